// The forward of a rerun region: as `RerunFrame.run` of a call that is not verified.

#pragma once

#include "history.h"

namespace membudget {

// As `Surroundings.finish`, of a call that is not verified.
inline void finish(PyObject* of, PyObject* calls) {
  if (around::ambient.is_none(of)) {
    return;
  }
  if (!around::reads.is_none(of)) {
    call(of, finish_name, calls);
    return;
  }
  PyObject* tensors = given::tensors.of(around::arguments.of(of));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    PyObject* held = PyList_GET_ITEM(tensors, i);
    if (!held_tensor.is_type_of(held)) {
      call(held, note_forward_end_name);
    } else if (!is_as_held(held)) {
      one_held::changed_by_region.set(held, Py_True);
    }
  }
}

inline void note_end(PyObject* frame, PyObject* calls) {
  finish(region::surroundings.of(frame), calls);
  if (calls == Py_None) {
    return;
  }
  if (owner::adds_gradients.is_true(calls::owner.of(calls))) {
    region::nested_backward.set(frame, Py_True);
  }
  if (!is_known_path(calls, region::metadata.of(frame))) {
    call(frame, note_new_name);
  }
}

inline Ref call_hooked(PyObject* frame, PyObject* args, PyObject* kwargs) {
  Ref pack = Ref::made(PyCFunction_New(&drop_method, frame));
  Ref unpack = Ref::made(PyCFunction_New(&give_method, frame));
  push_hooks(pack, unpack);
  PyObject* result = PyObject_Call(region::function.of(frame), args, kwargs);
  {
    ErrorAside error;
    at::SavedTensorDefaultHooks::pop_hooks();
  }
  return Ref::made(result);
}

inline bool needs_nothing_else(PyObject* frame) {
  PyObject* options = region::options.of(frame);
  return options::offload.is_none(options) && !options::is_instrumented.is_true(options) &&
      around::random_log.is_none(region::surroundings.of(frame));
}

// run(frame, args, kwargs): as `RerunFrame.run`.
inline PyObject* run_frame(PyObject*, PyObject* const* given, Py_ssize_t) {
  HANDLE_TH_ERRORS
  PyObject *frame = given[0], *calls = region::calls.of(frame);
  PyObject* again = options::verify.is_true(region::options.of(frame)) ? Py_True : Py_False;
  bool is_due = calls != Py_None && begin_call(calls, again);
  if (is_due || !needs_nothing_else(frame) ||
      (calls != Py_None && owner::differentiates.is_true(calls::owner.of(calls)))) {
    return call(frame, run_begun_name, given[1], given[2], is_due ? Py_True : Py_False)
        .release();
  }
  Ref result = call_hooked(frame, given[1], given[2]);
  if (PyList_GET_SIZE(region::handles.of(frame)) != 0) {
    note_end(frame, calls);
  }
  region::finished.set(frame, Py_True);
  return result.release();
  END_HANDLE_TH_ERRORS
}

} // namespace membudget
