// The saved-tensor hooks: the common paths of `ReplayFrame._pack` and `_unpack`.

#pragma once

#include "revisit.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace membudget {

inline Class frame_class;
namespace frame {
inline Slot arguments, checks, function, inputs, lock, named, outer, recorder, replayer, statistics;
}

inline long first_task;  // As `replayer.FIRST_TASK`.

inline Class checks_class;
namespace checks {
inline Slot comparison, is_strict, originals, recorder, statistics, verified, verify;
}

inline PyObject *empty_name;
inline PyObject *pack_name, *unpack_name, *explained_name, *open_groups;

// Packing.

inline bool is_common_save(PyObject* of, PyObject* recorder, PyObject* object) {
  if (!is_usual_class(object)) {
    return false;
  }
  PyObject* checks = frame::checks.of(of);
  PyObject* path = recording::path.of(recorder::recording.of(recorder));
  return is_plain(THPVariable_Unpack(object)) && checks::originals.is_none(checks) &&
      recorder::fingerprinter.is_none(recorder) && !checks::is_strict.is_true(checks) &&
      (checks::verified.is_none(checks) || path != Py_None);
}

// What autograd stores for the next saved tensor of a route; null without one, or if the
// call leaves it here.
inline Ref stop_of(PyObject* recording, PyObject* object) {
  if (recording::trip.is_none(recording)) {
    return Ref();
  }
  // Under a mode, Python sees operators, also the `detach` of what is held.
  bool is_seen = c10::impl::TorchDispatchModeTLS::stack_len() > 0;
  Ref stop = is_seen ? Ref() : stop_at(recording, object);
  if (stop == nullptr) {
    leave(recording, true);
  }
  return stop;
}

// pack(tensor), a method of the frame.
inline PyObject* pack(PyObject* of, PyObject* object) {
  HANDLE_TH_ERRORS
  PyObject* recorder = frame::recorder.of(of);
  if (recorder != Py_None) {
    if (Ref stop = stop_of(recorder::recording.of(recorder), object); stop != nullptr) {
      return stop.release();
    }
  }
  if (recorder == Py_None || !is_common_save(of, recorder, object)) {
    return call(of, pack_name, object).release();
  }
  PyObject* recording = recorder::recording.of(recorder);
  PyObject* tracker = recording::tracker.of(recording);
  Ref entry = entry_of(tracker, THPVariable_Unpack(object), object);
  if (is_empty(entry::value.of(entry))) {
    return call(of, pack_name, object).release();
  }
  Ref handle = new_handle(mark_read(tracker, object, entry));
  note_recent(recording, handle, object);
  PyObject* replayer = frame::replayer.of(of);
  put_in_stage(recording, replayer, handle);
  check(PyList_Append(replayer::handles.of(replayer), weak(handle)));
  survey_save(recording, handle, THPVariable_Unpack(object));
  return handle.release();
  END_HANDLE_TH_ERRORS
}

// Unpacking.

// Holds the frame's lock, if no other thread does; or waits for it.
class Locked {
 public:
  explicit Locked(PyObject* lock, bool waits = false) : lock_(lock) {
    taken_ = call(lock, acquire_name, waits ? Py_True : Py_False) == Py_True;
  }
  ~Locked() {
    if (taken_) {
      ErrorAside error;
      Py_XDECREF(PyObject_CallMethodNoArgs(lock_, release_name));
    }
  }
  Locked(const Locked&) = delete;
  bool taken() const { return taken_; }

 private:
  PyObject* lock_;
  bool taken_;
};

// As `Replayer._lent`, of a value of the current plan that its stage does not retain.
inline Ref lent(PyObject* of, PyObject* value, Ref tensor) {
  PyObject* owner = root_of(value);
  bool is_alone = value::sharing.is_none(owner) && value::reads.number(owner) <= 0;
  return value::operation.is_none(owner) || is_alone
      ? tensor
      : call(of, lent_name, value, (PyObject*)tensor);
}

// As `Replayer.take` of a value that stays in memory; null if Python must.
inline Ref held(PyObject* value) {
  PyObject* object = value::tensor.of(value);
  if (object == Py_None || value::version.is_none(value) || !is_usual_class(object)) {
    return Ref();
  }
  const at::Tensor& tensor = THPVariable_Unpack(object);
  bool is_same = is_plain(tensor) && tensor.storage().nbytes() > 0 &&
      value::version.number(value) == tensor._version();
  return is_same ? Ref::to(object) : Ref();
}

// Whether this backward pass has planned, and replayed something that `_count_run` has
// counted: of the plan, or of any stage.
inline bool is_planned(PyObject* of) {
  long task = replayer::task.number(of);
  long counted = replayer::stage.number(of) < 0 ? replayer::plan.number(of)
                                                : -task - first_task;
  return replayer::plan_ran.number(of) == counted &&
      task == torch::autograd::get_current_graph_task_id();
}

// Whether the current plan serves a handle, for the first time.
inline bool is_served_now(PyObject* of, PyObject* handle) {
  long stage = replayer::stage.number(of), plan = replayer::plan.number(of);
  return (stage < 0 || stage == handle::stage.number(handle)) &&
      value::plan.number(handle::value.of(handle)) == plan &&
      handle::served.number(handle) != plan;
}

// As `Replayer.take`, of what the current plan makes and no stage retains; null if Python
// must.
inline Ref taken(PyObject* of, PyObject* handle) {
  PyObject* value = handle::value.of(handle);
  if (is_held(value)) {
    return held(value);
  }
  if (!is_served_now(of, handle) || value::is_carried.is_true(root_of(value))) {
    return Ref();
  }
  if (value::tensor.is_none(value)) {
    if (!is_planned(of) || !materialise(of, value)) {
      return Ref();
    }
  }
  Ref tensor = Ref::to(value::tensor.of(value));
  handle::served.set(handle, replayer::plan.of(of));
  used(of, value);
  return lent(of, value, std::move(tensor));
}

// Turns an error of a replay into the one that the user sees, as `ReplayFrame._take`.
[[noreturn]] inline void explain(PyObject* of, python_error& error) {
  error.restore();
  PyObject *type, *raised, *trace;
  PyErr_Fetch(&type, &raised, &trace);
  PyErr_NormalizeException(&type, &raised, &trace);
  if (trace != nullptr) {
    PyException_SetTraceback(raised, trace);
  }
  Ref explained = call(of, explained_name, raised);
  Py_XDECREF(type);
  Py_XDECREF(raised);
  Py_XDECREF(trace);
  PyErr_SetObject((PyObject*)Py_TYPE((PyObject*)explained), explained);
  throw_python_error();
}

inline Ref taken_or_explained(PyObject* of, PyObject* handle) {
  try {
    return taken(frame::replayer.of(of), handle);
  } catch (python_error& error) {
    explain(of, error);
  } catch (...) {
    PyErr_Clear();  // What failed in leaving has failed because of this.
    call(frame::replayer.of(of), release_name);
    throw;
  }
}

// Whether what a handle stands for is ready for work that is launched now.
inline bool is_awaited(PyObject* of, PyObject* handle) {
  if (replayer::stream.is_none(of)) {
    return true;
  }
  PyObject* made_by = value::operation.of(root_of(handle::value.of(handle)));
  return is_current(replayer::stream.of(of)) &&
      (made_by == Py_None || operation::stream.is_none(made_by));
}

// The tensor of a saved one on a route; null, with the tape written, if that serves it.
inline Ref stopped(PyObject* of, Stop& stop) {
  PyObject* recorder = frame::recorder.of(of);
  if (stop.handle != nullptr) {
    return Ref();
  }
  if (recorder != Py_None) {  // A backward pass inside the forward.
    leave(recorder::recording.of(recorder), false);
    return Ref();
  }
  Locked lock(frame::lock.of(of), true);
  if (stop.handle != nullptr) {
    return Ref();
  }
  PyObject* replayer = frame::replayer.of(of);
  if (PyList_GET_SIZE(open_groups) == 0 && is_current(replayer::stream.of(replayer))) {
    if (Ref tensor = revisited(of, stop); tensor != nullptr) {
      return tensor;
    }
  }
  write_tape_of(replayer);
  return Ref();
}

// unpack(handle), a method of the frame.
inline PyObject* unpack(PyObject* of, PyObject* handle) {
  HANDLE_TH_ERRORS
  if (StopBox::holds(handle)) {
    Stop& stop = StopBox::of(handle);
    if (Ref tensor = stopped(of, stop); tensor != nullptr) {
      return tensor.release();
    }
    handle = stop.handle;
  }
  if (frame::recorder.is_none(of) && handle::saved_version.is_none(handle) &&
      handle::fingerprint.is_none(handle) && PyList_GET_SIZE(open_groups) == 0 &&
      is_awaited(frame::replayer.of(of), handle)) {
    Locked lock(frame::lock.of(of));
    Ref tensor = lock.taken() ? taken_or_explained(of, handle) : Ref();
    if (tensor != nullptr) {
      return tensor.release();
    }
  }
  return call(of, unpack_name, handle).release();
  END_HANDLE_TH_ERRORS
}

inline PyMethodDef pack_method = {"pack", pack, METH_O, nullptr};
inline PyMethodDef unpack_method = {"unpack", unpack, METH_O, nullptr};

// hooks(frame): the pair of hooks, as methods of the frame.
inline PyObject* hooks(PyObject*, PyObject* of) {
  return bound_pair(&pack_method, &unpack_method, of);
}

} // namespace membudget
