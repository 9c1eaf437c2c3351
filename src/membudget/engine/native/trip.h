// A call that follows a route: what it has met so far, and what it holds for the backward.

#pragma once

#include <c10/util/flat_hash_map.h>

#include <optional>
#include <set>

#include "survey.h"

namespace membudget {

using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// One value of a trip.
struct Met {
  std::optional<Weak> live;  // In the forward: no other tensor gets its address.
  std::optional<WeakStorage> memory;  // Likewise.
  at::Tensor tensor;  // What is held, or was recomputed.
  long version = 0;  // Of a held tensor, at the end of the forward.
  int needs = 0;  // As in the route, less what autograd has freed.
  int uses = 0;  // What will yet use it in the plan,
  int memory_uses = 0;  // what will use it or a view of it,
  int reads = 0;  // and which of that are operators that read its memory.
  size_t place = 0;  // The value for which a replay made the memory that it owns.
  bool is_carried = false;  // Whether the stage retains it for later ones.
};

// Memory that a step has overwritten, which no replay makes: tensors that were in it then.
struct Overwritten {
  size_t step;
  std::vector<Weak> tensors;
};

struct Stop;

struct Trip {
  std::shared_ptr<const Route> route;
  Ref known;  // All routes of the signature, as `Known` in Python.
  PyObject* replayer;  // It owns the trip.
  c10::ScalarType dtype;  // The default one.
  std::vector<Met> values = {};
  std::vector<std::optional<WeakStorage>> memories = {};  // By their numbers,
  ska::flat_hash_map<const c10::StorageImpl*, size_t> numbers = {};  // and reversed.
  std::vector<int> steps = {};  // How many values need each.
  std::vector<Ref> drawn = {};  // The state that each step drew from, or null.
  std::vector<Stop*> stops = {};  // By number of the saved tensor; null once freed.
  std::vector<Overwritten> written = {};
  std::vector<std::pair<size_t, Ref>> recent = {};  // Stops since the last step, and tensors.
  size_t at = 0;  // How many steps have run.
  size_t chosen = 0;  // Which of the known routes it follows.
  std::unordered_map<size_t, Call> own = {};  // Calls of steps whose numbers differ here.
  // What has been met since the last step or saved tensor: values, and memory.
  std::vector<size_t> latest = {}, latest_memories = {};
  bool is_left = false;
  // The plan, by which uses are counted: its number, and whom it serves.
  long plan = 0;
  long task = -2;  // The backward pass,
  long stage = -1;  // and the stage of it; -1 if there is only one.
  bool has_run = false;  // Whether something was recomputed in the backward pass.
  size_t turn = 0;  // That of the stage, and what it reads of earlier turns.
  std::set<size_t> entries = {};
};

using TripBox = Box<Trip>;

// The call that a step makes.
inline const Call& call_of(const Trip& trip, size_t step) {
  auto own = trip.own.find(step);
  return own == trip.own.end() ? trip.route->steps[step].call : own->second;
}

inline bool is_held(const Trip& trip, size_t value) {
  return trip.route->values[value].is_held();
}

inline const c10::StorageImpl* storage_of(const Met& met) {
  return met.memory ? met.memory->_unsafe_get_target() : nullptr;
}

// The step that was the last to write to each memory that a replay makes, or -1.
inline std::vector<long> last_writes(const Trip& trip) {
  const Route& route = *trip.route;
  std::vector<long> last(route.makes_memory.size(), -1);
  for (size_t i = 0; i < trip.at; ++i) {
    if (route.steps[i].writes()) {
      last[route.values[route.steps[i].outputs[1]].memory] = static_cast<long>(i);
    }
  }
  return last;
}

// Whether the memory of a value has been written to since the value was made.
inline bool is_overwritten(const Trip& trip, const std::vector<long>& last, size_t value) {
  const RouteValue& known = trip.route->values[value];
  return known.step < last[known.memory];
}

// One saved tensor no longer needs a value: as when the last handle of a `TapeValue` dies.
inline void release(Trip& trip, size_t value) {
  std::vector<size_t> released = {value};
  while (!released.empty()) {
    size_t number = released.back();
    released.pop_back();
    Met& met = trip.values[number];
    if (--met.needs > 0) {
      continue;
    }
    at::Tensor freed = std::move(met.tensor);
    long step = trip.route->values[number].step;
    if (!is_held(trip, number) && --trip.steps[step] == 0) {
      const auto& inputs = trip.route->steps[step].inputs;
      released.insert(released.end(), inputs.begin(), inputs.end());
    }
  }
}

// The placeholder that autograd stores instead of a tensor that it saves.
struct Stop {
  Ref trip;
  size_t number;
  long served = 0;  // The plan that has served it.
  Ref handle = {};  // The `ReplayHandle`, once the tape is written.

  ~Stop() {
    Trip& of = TripBox::of(trip);
    of.stops[number] = nullptr;
    if (!of.is_left) {
      release(of, of.route->saves[number].value);
    }
  }
};

using StopBox = Box<Stop>;

inline const std::shared_ptr<const Route>& route_at(PyObject* known, size_t i) {
  return RouteBox::of(PyTuple_GET_ITEM(PyTuple_GET_ITEM(known, i), 1));
}

// Makes room for what the route has.
inline void make_room(Trip& trip) {
  trip.values.resize(trip.route->values.size());
  trip.memories.resize(trip.route->makes_memory.size());
  trip.drawn.resize(trip.route->steps.size());
}

// Counts what needs each value and each step, less what autograd has freed.
inline void count_needs(Trip& trip) {
  const Needs& needs = trip.route->needs;
  for (size_t i = 0; i < trip.values.size(); ++i) {
    trip.values[i].needs = needs.values[i];
  }
  trip.steps = needs.steps;
  for (size_t i = 0; i < trip.stops.size(); ++i) {
    if (trip.stops[i] == nullptr) {
      release(trip, trip.route->saves[i].value);
    }
  }
}

// trip(known, replayer): a call that begins to follow the first of the known routes.
inline PyObject* new_trip(PyObject*, PyObject* const* given, Py_ssize_t) {
  HANDLE_TH_ERRORS
  Ref made = TripBox::make(
      route_at(given[0], 0), Ref::to(given[0]), given[1],
      c10::typeMetaToScalarType(at::get_default_dtype()));
  Trip& trip = TripBox::of(made);
  make_room(trip);
  count_needs(trip);
  trip.numbers.reserve(trip.memories.size());
  trip.stops.reserve(trip.route->saves.size());
  return made.release();
  END_HANDLE_TH_ERRORS
}

} // namespace membudget
