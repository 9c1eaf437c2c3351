// Leave a route: the tape of its call so far is written.
//
// In the forward, living tensors get their values, and the recorder goes on from there. In
// the backward, Python replays what C++ does not: a second time in one pass, for example.

#pragma once

#include "follow.h"
#include "writer.h"

namespace membudget {

inline PyObject *end_trip, *put_name;

// Frees what a trip holds, once the tape holds it.
inline void end(Trip& trip) {
  trip.is_left = true;
  auto values = std::move(trip.values);
  auto drawn = std::move(trip.drawn);
  trip.recent.clear();
  trip.written.clear();
}

// Counts the steps of a trip among the operators of its recording.
inline void note_steps(PyObject* recording, const Trip& trip) {
  long number = trip.at == 0 ? 0 : trip.route->steps[trip.at - 1].number;
  recording::number.set_number(recording, number);
  recording::place.set(recording, recording::number.of(recording));
  long kept = 0;
  for (size_t i = 0; i < trip.at; ++i) {
    kept += trip.route->steps[i].kept;
  }
  add(recording::kept, recording, kept);
}

inline void note_end_of_trip(PyObject* recording, PyObject* has_arrived) {
  Ref::made(PyObject_CallFunctionObjArgs(end_trip, recording, has_arrived, nullptr));
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

// Leaves the route in the forward; the recorder goes on with the tape.
inline void leave(PyObject* recording) {
  Ref box = Ref::to(recording::trip.of(recording));
  recording::trip.set(recording, Py_None);
  Trip& trip = TripBox::of(box);
  PyObject* tracker = recording::tracker.of(recording);
  tracker::clock.set_number(tracker, Writer(trip, tracker).write());
  note_steps(recording, trip);
  for (auto& [stop, tensor] : trip.recent) {
    bool is_alive = trip.stops[stop] != nullptr;
    Ref handle = is_alive ? trip.stops[stop]->handle : new_handle(Ref::to(Py_None));
    put_in_stage(recording, trip.replayer, handle);
    if (is_alive) {
      note_recent(recording, handle, tensor);
    }
  }
  replayer::trip.set(trip.replayer, Py_None);
  end(trip);
  note_end_of_trip(recording, Py_False);
}

// leave(recording)
inline PyObject* leave_route(PyObject*, PyObject* recording) {
  HANDLE_TH_ERRORS
  leave(recording);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Leaves the route once the forward has ended.
inline void write_tape_of(PyObject* replayer) {
  Ref box = Ref::to(replayer::trip.of(replayer));
  replayer::trip.set(replayer, Py_None);
  Trip& trip = TripBox::of(box);
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
  const Route& route = *trip.route;
  if (trip.at != route.steps.size() || trip.stops.size() != route.saves.size()) {
    leave(recording);
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
  note_end_of_trip(recording, Py_True);
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

} // namespace membudget
