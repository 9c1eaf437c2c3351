// The common paths of `Recorder.observe`.
//
// Everything else is left to Python, which works on the same objects: calls that are
// verified, tensors that are no plain dense ones, memory that was written before it was
// met, policies that ask for more than the operator, work on another stream.

#pragma once

#include "leave.h"
#include "write.h"

namespace membudget {

// Whether C++ can record this call.
inline bool is_common(
    PyObject* of, const Operator& known, const c10::Stack& stack, size_t first) {
  if (known.kind == Kind::other || !is_idle(of)) {
    return false;
  }
  bool are_plain = true;
  for_each_tensor(known, stack, first, [&](const at::Tensor& tensor, Place) {
    are_plain &= is_plain(tensor);
  });
  if (!are_plain || (known.is_random && !draws_on_cpu(known, stack, first))) {
    return false;
  }
  PyObject* recording = recorder::recording.of(of);
  if (!is_current(recording::stream.of(recording))) {
    return false;
  }
  return !recording::reads_arguments.is_true(recording) ||
      decided(recording, known) != Py_None;
}

// Runs an operator that is the next step of a call's route, and returns whether it was;
// if not, or if the step makes something else, the call leaves its route.
inline bool follow(
    PyObject* of,
    const Operator& known,
    const c10::OperatorHandle& target,
    c10::DispatchKeySet below,
    c10::Stack& stack) {
  PyObject* recording = recorder::recording.of(of);
  if (recorder::is_suspended.is_true(of) || recording::trip.is_none(recording)) {
    return false;
  }
  Trip& trip = TripBox::of(recording::trip.of(recording));
  size_t first = stack.size() - target.schema().arguments().size();
  bool is_next_step = is_idle(of) && is_current(recording::stream.of(recording)) &&
      goes_on(trip, recording, false, [&] { return is_next(trip, known, stack, first); });
  if (!is_next_step) {
    leave(recording, true);
    return false;
  }
  if (!take_step(trip, recording, target, below, stack)) {
    leave(recording, false);
    add(recording::number, recording, 1);
    add(recording::place, recording, 1);
  }
  return true;
}

// Whether `as_strided`, which counts from the start of the storage, views memory that no
// replay makes: hooks around the region may return that in another storage.
inline bool is_view_of_held(PyObject* tracker, const c10::Stack& stack, size_t first) {
  const at::Tensor& tensor = stack[first].toTensor();
  return is_held_memory(entry_of(tracker, tensor, wrapped(tensor)));
}

// Runs and records one operator; false, with nothing done, if Python must.
inline bool observe(
    PyObject* of,
    const Operator& known,
    const c10::OperatorHandle& target,
    c10::DispatchKeySet below,
    c10::Stack* stack) {
  if (follow(of, known, target, below, *stack)) {
    return true;
  }
  size_t first = stack->size() - target.schema().arguments().size();
  if (!is_common(of, known, *stack, first)) {
    return false;
  }
  PyObject* recording = recorder::recording.of(of);
  PyObject* tracker = recording::tracker.of(recording);
  bool writes = known.writes_first() || known.kind == Kind::normalisation;
  if (writes && !tracker::writes.is_none(tracker)) {
    return false;  // Verification copies or fingerprints before the write.
  }
  Ref entry;  // Of what is overwritten.
  if (known.writes_first()) {
    const at::Tensor& target = (*stack)[first].toTensor();
    entry = entry_of(tracker, target, wrapped(target));
    if (known.kind == Kind::in_place && !is_held_memory(entry) &&
        !is_writable(entry, known, *stack, first)) {
      return false;
    }
  }
  if (known.overload == view_operator && is_view_of_held(tracker, *stack, first)) {
    return false;
  }
  advance(recording, known);
  Observed call{of, recording, tracker, known, target, *stack, first};
  if (known.kind == Kind::in_place && !is_held_memory(entry)) {
    observe_write(call, below, entry);
  } else if (known.writes_first()) {
    observe_held_write(call, below, entry);
  } else if (known.kind == Kind::normalisation) {
    observe_normalisation(call, below);
  } else if (known.kind == Kind::empty) {
    observe_empty(call, below);
  } else {
    observe_fresh(call, below);
  }
  return true;
}

} // namespace membudget
