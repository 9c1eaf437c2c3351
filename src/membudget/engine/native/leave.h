// Leave a route: the tape of its call so far is written.
//
// In the forward, living tensors get their values, and the recorder goes on from there. In
// the backward, Python replays what C++ does not: a second time in one pass, for example.

#pragma once

#include "follow.h"
#include "writer.h"

namespace membudget {

inline PyObject *end_trip, *realign_in_python, *put_name, *survey_name;

// Frees what a trip holds, once the tape holds it.
inline void end(Trip& trip) {
  trip.is_left = true;
  auto values = std::move(trip.values);
  auto drawn = std::move(trip.drawn);
  trip.recent.clear();
  trip.written.clear();
}

// Numbers the operators of a call that has left its route, where the policy has other numbers.
inline void realign(PyObject* recording, const Trip& trip, const Writer& tape) {
  Ref steps = Ref::made(PyList_New(0));
  for (size_t i = 0; i < trip.at; ++i) {
    const Step& step = trip.route->steps[i];
    if (!step.is_rebased()) {
      check(PyList_Append(steps, pair(step.known->name, number(tape.before(i)))));
    }
  }
  Ref::made(PyObject_CallFunctionObjArgs(realign_in_python, recording, (PyObject*)steps, nullptr));
}

// Counts the steps of a trip among the operators of its recording.
inline void note_steps(PyObject* recording, const Trip& trip) {
  const Step* last = trip.at == 0 ? nullptr : &trip.route->steps[trip.at - 1];
  recording::number.set_number(recording, last == nullptr ? 0 : last->number);
  recording::place.set_number(recording, last == nullptr ? 0 : last->place);
  long kept = 0;
  for (size_t i = 0; i < trip.at; ++i) {
    kept += trip.route->steps[i].kept;
  }
  add(recording::kept, recording, kept);
}

// Tells the policy and the routes how a trip has ended, and on which route.
inline void note_end_of_trip(PyObject* recording, const Trip& trip, PyObject* has_arrived) {
  PyObject* last = PyTuple_GET_ITEM((PyObject*)trip.known, trip.chosen);
  long reached = 0;
  for (size_t i = 0; i < trip.at; ++i) {
    reached = std::max(reached, trip.route->steps[i].place);
  }
  Ref::made(PyObject_CallFunctionObjArgs(
      end_trip, recording, last, has_arrived, (PyObject*)number(reached), nullptr));
}

// Whether the policy counts operators otherwise than the call does.
inline bool is_shifted(const Trip& trip) {
  const auto& steps = trip.route->steps;
  return std::any_of(steps.begin(), steps.begin() + trip.at, [](const Step& step) {
    return !step.is_rebased() && step.place != step.number;
  });
}

// Assigns a saved tensor to its stage, and counts it among those since the last operator.
inline void put_in_stage(PyObject* recording, PyObject* replayer, PyObject* handle) {
  if (!replayer::stages.is_none(replayer)) {
    call(replayer::stages.of(replayer), put_name, handle, recording::number.of(recording),
         recording::place.of(recording));
  }
}

// Notes a tensor that was saved since the last operator, with its handle.
inline void note_recent(PyObject* recording, PyObject* handle, PyObject* tensor) {
  if (!recording::path.is_none(recording)) {
    check(PyList_Append(recording::recent.of(recording), pair(handle, tensor)));
  }
}

// Surveys the rest of a call that has left its route: what comes before is known.
inline void survey_on(Survey& of, const Trip& trip, const Writer& tape) {
  const Route& route = *trip.route;
  size_t values = count_values(route, trip.at, trip.stops.size());
  of.route->steps.assign(route.steps.begin(), route.steps.begin() + trip.at);
  of.route->values.assign(route.values.begin(), route.values.begin() + values);
  of.route->saves.assign(route.saves.begin(), route.saves.begin() + trip.stops.size());
  of.route->reads_sizes = route.reads_sizes;
  for (auto& [step, call] : trip.own) {
    if (step < trip.at) {
      of.route->steps[step].call = call;
    }
  }
  for (size_t i = 0; i < values; ++i) {
    if (PyObject* value = tape.written(i)) {
      of.numbers.insert_or_assign(value, Numbered{i, weak(value)});
    }
  }
  size_t memories = count_memories(*of.route);
  for (size_t i = 0; i < memories; ++i) {
    if (!trip.memories[i]) {
      of.is_whole = false;
      return;
    }
    of.storages.push_back(*trip.memories[i]);
    of.memories.emplace(of.storages.back()._unsafe_get_target(), i);
    of.route->makes_memory.push_back(route.makes_memory[i]);
  }
  for (const Stop* stop : trip.stops) {
    of.handles.push_back(stop == nullptr ? Ref() : weak(stop->handle));
  }
  of.operators = trip.at == 0 ? 0 : route.steps[trip.at - 1].number;
}

// Leaves the route in the forward; the recorder goes on with the tape. A survey goes on if
// all that has run is on the tape.
inline void leave(PyObject* recording, bool may_survey) {
  Ref box = Ref::to(recording::trip.of(recording));
  recording::trip.set(recording, Py_None);
  Trip& trip = TripBox::of(box);
  WithoutCollection stops_stay;
  PyObject* tracker = recording::tracker.of(recording);
  Writer tape(trip, tracker);
  tracker::clock.set_number(tracker, tape.write());
  note_steps(recording, trip);
  if (is_shifted(trip)) {
    realign(recording, trip, tape);
  }
  for (auto& [stop, tensor] : trip.recent) {
    bool is_alive = trip.stops[stop] != nullptr;
    Ref handle = is_alive ? trip.stops[stop]->handle : new_handle(Ref::to(Py_None));
    put_in_stage(recording, trip.replayer, handle);
    if (is_alive) {
      note_recent(recording, handle, tensor);
    }
  }
  replayer::trip.set(trip.replayer, Py_None);
  if (may_survey) {
    Ref survey = call(recording::routes.of(recording), survey_name);
    if (survey != Py_None) {
      survey_on(SurveyBox::of(survey), trip, tape);
    }
    recording::survey.set(recording, std::move(survey));
  }
  note_end_of_trip(recording, trip, Py_False);
  end(trip);
}

// leave(recording)
inline PyObject* leave_route(PyObject*, PyObject* recording) {
  HANDLE_TH_ERRORS
  leave(recording, false);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Leaves the route once the forward has ended.
inline void write_tape_of(PyObject* replayer) {
  Ref box = Ref::to(replayer::trip.of(replayer));
  replayer::trip.set(replayer, Py_None);
  Trip& trip = TripBox::of(box);
  WithoutCollection stops_stay;
  Writer(trip, nullptr).write();
  end(trip);
}

// write_tape(replayer): as `leave`, once the forward has ended.
inline PyObject* write_tape(PyObject*, PyObject* replayer) {
  HANDLE_TH_ERRORS
  write_tape_of(replayer);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// arrive(recording): ends a trip with its call; false, with the tape written, if the call
// ended on the way.
inline PyObject* arrive(PyObject*, PyObject* recording) {
  HANDLE_TH_ERRORS
  Ref box = Ref::to(recording::trip.of(recording));
  Trip& trip = TripBox::of(box);
  auto is_at_end = [&] {
    return trip.at == trip.route->steps.size() && trip.stops.size() == trip.route->saves.size();
  };
  if (!goes_on(trip, recording, false, is_at_end)) {
    leave(recording, true);
    Py_RETURN_FALSE;
  }
  for (Met& met : trip.values) {
    met.live.reset();
    if (met.tensor.defined()) {
      met.version = met.tensor._version();
    } else {
      met.memory.reset();
    }
  }
  trip.recent.clear();
  trip.written.clear();
  recording::trip.set(recording, Py_None);
  note_steps(recording, trip);
  note_end_of_trip(recording, trip, Py_True);
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

} // namespace membudget
