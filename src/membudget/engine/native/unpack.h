// The unpack hook of rerun regions: as `RerunFrame._unpack`, with the recompute that it
// may ask for.

#pragma once

#include "again.h"

namespace membudget {

// Counts this thread among those that recompute, and in a region, while this lives.
class Counted {
 public:
  explicit Counted(bool is_guarded)
      : thread_(Ref::made(PyLong_FromUnsignedLong(PyThread_get_thread_ident()))) {
    is_counted_ = is_guarded && enter_isolated();
    check(PyList_Append(recomputing, thread_));
  }
  ~Counted() {
    ErrorAside error;
    Py_ssize_t place = PySequence_Index(recomputing, thread_);
    if (place >= 0) {
      PySequence_DelItem(recomputing, place);
    }
    if (is_counted_) {
      leave_isolated();
    }
  }
  Counted(const Counted&) = delete;

 private:
  Ref thread_;
  bool is_counted_;
};

// As `RerunFrame._recompute`.
inline void recompute(PyObject* frame) {
  PyObject* statistics = region::statistics.of(frame);
  if (statistics != Py_None) {
    add(statistics::recomputes, statistics, 1);
  }
  Counted counted(options::guards.is_true(region::options.of(frame)));
  try {
    rerun_frame(frame);
  } catch (python_error& error) {
    error.restore();
    PyObject *type, *raised, *trace;
    PyErr_Fetch(&type, &raised, &trace);
    PyErr_NormalizeException(&type, &raised, &trace);
    call(frame, give_up_name, raised);
    PyErr_Restore(type, raised, trace);
    throw_python_error();
  }
}

// As `release_in_time`, outside of execution groups.
inline bool is_released_in_time(PyObject* frame) {
  Ref task = number(torch::autograd::get_current_graph_task_id());
  PyObject* frames = PyDict_GetItemWithError(by_backward, task);
  if (frames == nullptr) {
    return Ref::made(PyObject_CallOneArg(release_in_time, frame)) == Py_True;
  }
  check(PyList_Append(frames, weak(frame)));
  return true;
}

// As `RerunFrame._recomputed`, up to the tensor; does nothing if Python must.
inline void fill_all(PyObject* frame, PyObject* handle) {
  if (!region::finished.is_true(frame) || !is_usual_rerun(frame)) {
    return;
  }
  Locked lock(region::lock.of(frame));
  if (!lock.taken() || !saved::tensor.is_none(handle)) {
    return;
  }
  recompute(frame);
  if (PyErr_Occurred()) {  // An interrupt, while the thread was no longer counted.
    throw_python_error();
  }
  Ref tensor = Ref::to(saved::tensor.of(handle));
  if (PyList_GET_SIZE(region::handles.of(frame)) > 1 && !is_released_in_time(frame)) {
    call(frame, empty_name);
    saved::tensor.set(handle, tensor);
  }
  if (tensor == Py_None) {
    call(frame, missing_name);
  }
}

// unpack(handle), a method of the frame.
inline PyObject* give(PyObject* frame, PyObject* handle) {
  HANDLE_TH_ERRORS
  bool is_usual = rerun_handle.is_type_of(handle) && PyList_GET_SIZE(open_groups) == 0;
  if (is_usual && saved::tensor.is_none(handle)) {
    fill_all(frame, handle);
  }
  if (!is_usual || !is_filled(handle)) {
    return PyObject_CallMethodOneArg(frame, unpack_name, handle);
  }
  Ref tensor = Ref::to(saved::tensor.of(handle));
  saved::tensor.set(handle, Py_None);
  return tensor.release();
  END_HANDLE_TH_ERRORS
}

inline PyMethodDef give_method = {"give", give, METH_O, nullptr};

} // namespace membudget
