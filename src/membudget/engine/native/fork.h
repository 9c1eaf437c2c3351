// Go on along another route, where the one that a call has followed parts from its own.
//
//   known    embed  a b c d  a b c d  norm  head        a model, and
//            embed  a b c d  norm  head                 a call that dropped a layer
//   a call   embed  a b c d  norm ...                   goes on along the second here
//
// Up to there both have the same steps, and so the same numbers of values and of memory.

#pragma once

#include "arguments.h"
#include "trip.h"

namespace membudget {

// Whether two routes say the same.

inline bool are_alike(const RouteValue& one, const RouteValue& other) {
  return one.step == other.step && one.root == other.root && one.is_kept == other.is_kept &&
      one.memory == other.memory && one.dtype == other.dtype && one.device == other.device &&
      one.geometry == other.geometry;
}

// Whether two steps are of the same operator, and read the same.
inline bool read_alike(const Step& one, const Step& other) {
  return one.known == other.known && one.overload == other.overload &&
      one.inputs == other.inputs && one.part == other.part &&
      one.grad_enabled == other.grad_enabled && one.stood_in_for == other.stood_in_for &&
      one.number == other.number && one.place == other.place &&
      compared(one.call, other.call) <=
          (one.is_rebased() ? Alike::same : Alike::but_for_numbers);
}

inline bool are_alike(const Step& one, const Step& other) {
  return read_alike(one, other) && one.outputs == other.outputs &&
      one.is_view == other.is_view && one.kept == other.kept;
}

inline bool are_alike(const Save& one, const Save& other) {
  return one.value == other.value && one.after == other.after && one.stage == other.stage;
}

// How many values some steps and saved tensors have: they are numbered as they are met.
inline size_t count_values(const Route& route, size_t steps, size_t saves) {
  size_t count = 0;
  auto note = [&](long value) { count = std::max(count, static_cast<size_t>(value + 1)); };
  for (size_t i = 0; i < steps; ++i) {
    std::for_each(route.steps[i].inputs.begin(), route.steps[i].inputs.end(), note);
    std::for_each(route.steps[i].outputs.begin(), route.steps[i].outputs.end(), note);
  }
  for (size_t i = 0; i < saves; ++i) {
    note(static_cast<long>(route.saves[i].value));
  }
  return count;
}

inline size_t count_memories(const Route& route) {
  size_t count = 0;
  auto note = [&](size_t memory) { count = std::max(count, memory + 1); };
  for (const RouteValue& value : route.values) {
    note(value.memory);
  }
  for (const Step& step : route.steps) {
    std::for_each(step.stood_in_for.begin(), step.stood_in_for.end(), note);
  }
  return count;
}

inline bool have_same_arguments(const Step& one, const Step& other) {
  return compared(one.call, other.call) == Alike::same;
}

// same(route, other): whether two routes say the same, but for numbers that calls may have.
inline PyObject* say_the_same(PyObject*, PyObject* const* given, Py_ssize_t) {
  const Route &one = *RouteBox::of(given[0]), &other = *RouteBox::of(given[1]);
  auto alike = [](const auto& all, const auto& others) {
    return std::equal(
        all.begin(), all.end(), others.begin(), others.end(),
        [](const auto& one, const auto& other) { return are_alike(one, other); });
  };
  bool is_same = one.reads_sizes == other.reads_sizes && alike(one.steps, other.steps) &&
      alike(one.saves, other.saves) && alike(one.values, other.values);
  return PyBool_FromLong(
      is_same &&
      (!one.reads_sizes || std::equal(one.steps.begin(), one.steps.end(), other.steps.begin(),
                                      have_same_arguments)));
}

// Whether another route has the same steps and saved tensors as far as a call has come. One more
// step may have run, whose outputs are yet to be compared.
inline bool is_as_far(const Trip& trip, const Route& other, bool has_run) {
  const Route& own = *trip.route;
  size_t saves = trip.stops.size(), steps = trip.at;
  bool is_alike = steps + has_run <= other.steps.size() && saves <= other.saves.size() &&
      (saves == other.saves.size() || other.saves[saves].after >= steps + has_run) &&
      !(other.reads_sizes && !trip.own.empty()) &&
      (!has_run || read_alike(own.steps[steps], other.steps[steps]));
  for (size_t i = steps; is_alike && i-- > 0;) {
    is_alike = are_alike(own.steps[i], other.steps[i]);
  }
  for (size_t i = 0; is_alike && i < saves; ++i) {
    is_alike = are_alike(own.saves[i], other.saves[i]);
  }
  for (size_t i = is_alike ? count_values(own, steps, saves) : 0; is_alike && i-- > 0;) {
    is_alike = are_alike(own.values[i], other.values[i]);
  }
  return is_alike;
}

// Going on.

// Forgets what was met since the last step or saved tensor.
inline void undo(Trip& trip, size_t at) {
  trip.at = at;
  for (size_t value : trip.latest) {
    trip.values[value] = Met{};
  }
  for (size_t memory : trip.latest_memories) {
    trip.numbers.erase(trip.memories[memory]->_unsafe_get_target());
    trip.memories[memory].reset();
  }
  trip.latest.clear();
  trip.latest_memories.clear();
}

// Keeps the numbers of steps that have others on another route.
inline void keep_own_calls(Trip& trip, const Route& other, size_t steps) {
  for (size_t i = 0; i < steps; ++i) {
    const Call& known = trip.route->steps[i].call;
    if (trip.own.count(i) == 0 && compared(known, other.steps[i].call) != Alike::same) {
      trip.own.emplace(i, known);
    }
  }
}

// Holds what the route needs, and nothing else; false if some of it is gone.
inline bool hold_needed(Trip& trip) {
  auto written = last_writes(trip);
  for (size_t i = 0; i < trip.values.size(); ++i) {
    Met& met = trip.values[i];
    if (met.needs <= 0) {
      met.tensor.reset();
    } else if (met.memory && is_held(trip, i) && !met.tensor.defined()) {
      at::Tensor tensor = met.live ? at::Tensor(met.live->lock()) : at::Tensor();
      if (!tensor.defined() || storage_of(tensor) != storage_of(met) ||
          is_overwritten(trip, written, i)) {
        return false;
      }
      met.tensor = alias_of(tensor, wrapped(tensor));
    }
  }
  return true;
}

inline bool go_along(Trip& trip, size_t chosen, bool has_run) {
  const auto& other = route_at(trip.known, chosen);
  keep_own_calls(trip, *other, trip.at + has_run);
  trip.route = other;
  trip.chosen = chosen;
  make_room(trip);
  count_needs(trip);
  return hold_needed(trip);
}

// Whether a call goes on as its route says, or as another one; `is_as_said()` tells of the
// current route. With `has_run`, it tells what a step has made, which has run.
template <typename AsSaid>
bool goes_on(Trip& trip, PyObject* recording, bool has_run, const AsSaid& is_as_said) {
  size_t at = trip.at, followed = trip.chosen;
  bool is_known = false;
  try {
    is_known = is_as_said();
    for (Py_ssize_t i = 0; !is_known && i < PyTuple_GET_SIZE((PyObject*)trip.known); ++i) {
      undo(trip, at);
      size_t chosen = static_cast<size_t>(i);
      if (chosen != followed && is_as_far(trip, *route_at(trip.known, chosen), has_run)) {
        is_known = go_along(trip, chosen, has_run) && is_as_said();
      }
    }
  } catch (...) {  // Such as a failed allocation.
    undo(trip, at);
    throw;
  }
  if (!is_known) {
    undo(trip, at);
  } else if (trip.chosen != followed) {
    recording::path.set(
        recording, PyTuple_GET_ITEM(PyTuple_GET_ITEM((PyObject*)trip.known, trip.chosen), 0));
  }
  trip.latest.clear();
  trip.latest_memories.clear();
  return is_known;
}

} // namespace membudget
