// The forward of a replay region: as `ReplayFrame.run`, and as the observer enters and
// leaves a thread in which nothing else observes.

#pragma once

#include "frame.h"
#include "kernel.h"

#include <ATen/ThreadLocalPythonObjects.h>

namespace membudget {

inline PyObject *nothing_before, *observe_operators, *observed_by_python, *observers_of_thread,
    *set_out_in_python;
inline PyObject *abandon_name, *before_name, *end_name, *enter_name, *settle_name, *thread_name;
inline std::string shared_observers;

inline Class observing_thread;
namespace observing {
inline Slot all, depth, stack;
}

// Whether a thread has no observers, and its autograd threads know where it would have them.
inline bool is_unobserved(PyObject* stack) {
  using Shared = at::impl::ThreadLocalPythonObjects;
  return PyList_GET_SIZE(stack) == 0 && c10::impl::TorchDispatchModeTLS::stack_len() == 0 &&
      !c10::impl::tls_is_dispatch_key_excluded(observed_key) && Shared::contains(shared_observers) &&
      Shared::get(shared_observers)->ptr(getPyInterpreter()) == stack;
}

// As `Observer.__enter__`.
inline void enter(PyObject* recorder) {
  Ref thread = attribute(observers_of_thread, thread_name);
  PyObject* stack = observing::stack.of(thread);
  if (!is_unobserved(stack) || attribute(recorder, sees_subclasses_name) == Py_True) {
    call(recorder, enter_name);
    return;
  }
  Ref::made(PyObject_CallOneArg(observe_operators, observed_by_python));
  check(PyObject_SetAttr(recorder, before_name, nothing_before));
  check(PyList_Append(observing::all.of(thread), recorder));
  check(PyList_Append(stack, recorder));
  observing::depth.set_number(thread, 1);
  this_thread.recorder = recorder;
  c10::impl::tls_set_dispatch_key_included(observed_key, true);
}

// Whether a list has one item only, and which.
inline bool is_only(PyObject* list, PyObject* item) {
  return PyList_GET_SIZE(list) == 1 && PyList_GET_ITEM(list, 0) == item;
}

inline void pop_last(PyObject* list) {
  Py_ssize_t count = PyList_GET_SIZE(list);
  check(PyList_SetSlice(list, count - 1, count, nullptr));
}

// As `Observer.__exit__`.
inline void exit(PyObject* recorder) {
  Ref thread = attribute(observers_of_thread, thread_name);
  PyObject *all = observing::all.of(thread), *stack = observing::stack.of(thread);
  if (!is_only(stack, recorder) || !is_only(all, recorder)) {
    call(recorder, exit_name, Py_None, Py_None, Py_None);
    return;
  }
  pop_last(all);
  pop_last(stack);
  observing::depth.set(thread, zero);
  this_thread.recorder = nullptr;
  c10::impl::tls_set_dispatch_key_excluded(observed_key, false);
  c10::impl::tls_set_dispatch_key_included(observed_key, false);
}

// As `top_saved_tensors_hooks`.
inline Ref top_hooks() {
  auto found = at::SavedTensorDefaultHooks::get_hooks();
  if (!found.has_value()) {
    return Ref::to(Py_None);
  }
  return pair(found->first.ptr(getPyInterpreter()), found->second.ptr(getPyInterpreter()));
}

// As `following.set_out`.
inline void set_out(PyObject* recording, PyObject* replayer, PyObject* checks) {
  PyObject *routes = recording::routes.of(recording), *known = checks::verified.of(checks);
  if (routes == Py_None) {
    return;
  }
  bool is_sampled = known != Py_None && verified::is_sampled.is_true(known);
  PyObject* all = routes::known.of(routes);
  if (is_sampled || routes::is_due.is_true(routes) || PyTuple_GET_SIZE(all) == 0) {
    Ref::made(PyObject_CallFunctionObjArgs(
        set_out_in_python, recording, replayer, checks, nullptr));
    return;
  }
  PyObject* given[] = {all, replayer};
  Ref trip = Ref::made(new_trip(nullptr, given, 2));
  recording::path.set(recording, PyTuple_GET_ITEM(PyTuple_GET_ITEM(all, 0), 0));
  replayer::trip.set(replayer, trip);
  recording::trip.set(recording, std::move(trip));
}

// As `ReplayFrame.begin`.
inline void begin_frame(PyObject* frame) {
  PyObject* recorder = frame::recorder.of(frame);
  Ref outer = top_hooks();
  frame::outer.set(frame, outer);
  // First, as it may fail, and nothing is on the thread yet.
  if (outer == Py_None) {
    set_out(recorder::recording.of(recorder), frame::replayer.of(frame), frame::checks.of(frame));
  }
  Ref both = Ref::made(hooks(nullptr, frame));
  push_hooks(PyTuple_GET_ITEM((PyObject*)both, 0), PyTuple_GET_ITEM((PyObject*)both, 1));
  try {
    enter(recorder);
  } catch (...) {
    at::SavedTensorDefaultHooks::pop_hooks();
    throw;
  }
}

// As `ReplayFrame.end`, of a call that is on its trip.
inline void end_frame(PyObject* frame) {
  Ref recorder = Ref::to(frame::recorder.of(frame));
  PyObject* recording = recorder::recording.of(recorder);
  if (recording::trip.is_none(recording) || !is_idle(recorder)) {
    call(frame, end_name);
    return;
  }
  frame::recorder.set(frame, Py_None);
  frame::function.set(frame, Py_None);
  at::SavedTensorDefaultHooks::pop_hooks();
  exit(recorder);
  call(frame, settle_name, (PyObject*)recorder);
}

// run_replay(frame, args, kwargs): as `ReplayFrame.run`.
inline PyObject* run_replay(PyObject*, PyObject* const* given, Py_ssize_t) {
  HANDLE_TH_ERRORS
  PyObject* frame = given[0];
  begin_frame(frame);
  Ref function = Ref::to(frame::function.of(frame));
  PyObject* result = PyObject_Call(function, given[1], given[2]);
  if (result == nullptr) {
    ErrorAside error;
    call(frame, abandon_name);
    return nullptr;
  }
  Ref made = Ref::made(result);
  end_frame(frame);
  return made.release();
  END_HANDLE_TH_ERRORS
}

} // namespace membudget
