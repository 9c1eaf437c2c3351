// One recompute of a rerun region: as `Surroundings.run_in_context` of `Rerun.run`, but
// without what only some calls need (fingerprints, traces, contexts, gradients inside).

#pragma once

#include "generators.h"
#include "rerun.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/PyInterpreter.h>

namespace membudget {

inline bool is_autocast_on() {
  const auto& types = at::autocast::_AUTOCAST_SUPPORTED_DEVICES;
  return std::any_of(types.begin(), types.end(), at::autocast::is_autocast_enabled);
}

inline bool is_shared_now() {
  return Ref::made(PyObject_CallNoArgs(is_shared)) == Py_True;
}

// Whether modes and settings are those of the forward.
inline bool has_ambient(PyObject* of) {
  if (of == Py_None) {
    return true;
  }
  if (PyTuple_GET_SIZE(ambient::function_modes.of(of)) != 0 ||
      PyTuple_GET_SIZE(ambient::dispatch_modes.of(of)) != 0 ||
      at::impl::PythonTorchFunctionTLS::stack_len() != 0 ||
      is_shared_now()) {
    return false;
  }
  return has_settings(of);
}

// Whether `Surroundings.enter_ambient` would restore nothing but generators.
inline bool is_as_noted(PyObject* of) {
  return around::stream.is_none(of) && around::random_log.is_none(of) &&
      around::private_.is_none(of) && around::autocast.is_none(of) &&
      !is_autocast_on() && has_ambient(around::ambient.of(of));
}

// As `HeldTensor.rebuild`.
inline Ref rebuilt(PyObject* value) {
  if (!held_tensor.is_type_of(value)) {
    return held_tensor.is_base_of(value) ? call(value, rebuild_name) : Ref::to(value);
  }
  at::Tensor made = THPVariable_Unpack(one_held::alias.of(value)).detach();
  made.set_requires_grad(true);
  return wrapped(made);
}

// As `HeldTensor.has_changed`, of a held tensor of that very class.
inline bool is_as_held(PyObject* of) {
  return !one_held::changed_by_region.is_true(of) &&
      one_held::version.number(of) ==
      THPVariable_Unpack(one_held::alias.of(of))._version();
}

inline bool are_as_held(PyObject* tensors) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    PyObject* of = PyList_GET_ITEM(tensors, i);
    if (!held_tensor.is_type_of(of) || !is_as_held(of)) {
      return false;
    }
  }
  return true;
}

// As `HeldArguments.rebuild`, without keywords and containers.
inline Ref rebuilt_arguments(PyObject* of) {
  PyObject* values = given::args.of(of);
  Ref made = Ref::made(PyTuple_New(PyList_GET_SIZE(values)));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(values); ++i) {
    PyTuple_SET_ITEM((PyObject*)made, i, rebuilt(PyList_GET_ITEM(values, i)).release());
  }
  return made;
}

// Enters a copy of a forward's context, because one cannot be entered twice.
class InContext {
 public:
  explicit InContext(PyObject* noted) {
    if (noted != Py_None) {
      context_ = Ref::made(PyContext_Copy(ambient::context.of(noted)));
      check(PyContext_Enter(context_));
    }
  }
  ~InContext() {
    if (context_ != nullptr) {
      ErrorAside error;
      PyContext_Exit(context_);
    }
  }
  InContext(const InContext&) = delete;

 private:
  Ref context_;
};

// What is restored for one recompute, until it ends.
class Restored {
 public:
  explicit Restored(PyObject* of) : of_(of) {}
  Restored(const Restored&) = delete;

  // As `Surroundings.enter_ambient`.
  void enter_ambient() {
    if (!is_as_noted(of_)) {
      call(of_, enter_ambient_name, scope());
    } else if (!around::sources.is_none(of_)) {
      now_ = note_generators(around::sources.of(of_));
      if (now_ != around::noted.of(of_)) {
        restore_generators(around::noted.of(of_));
      }
    }
  }

  // As `Surroundings.enter_state`.
  Ref enter_state() {
    bool is_same = around::reads.is_none(of_) &&
        (around::ambient.is_none(of_) ||
         are_as_held(given::tensors.of(around::arguments.of(of_))));
    return is_same ? Ref::to(Py_None) : call(of_, enter_state_name, scope());
  }

  // An error that is set stays set; generators are restored even if the rest is not.
  void close() {
    ErrorAside error;
    try {
      if (scope_ != nullptr) {
        call(scope_, close_name);
      }
    } catch (...) {
      bring_back();
      throw;
    }
    bring_back();
  }

 private:
  void bring_back() {
    if (now_ != nullptr) {
      restore_generators(now_);
    }
  }

  PyObject* scope() {
    if (scope_ == nullptr) {
      scope_ = Ref::made(PyObject_CallNoArgs(scope_class));
    }
    return scope_;
  }

  PyObject* of_;
  Ref now_, scope_;
};

inline c10::SafePyObject safe(PyObject* object) {
  return {Py_NewRef(object), getPyInterpreter()};
}

inline void push_hooks(PyObject* pack, PyObject* unpack) {
  at::SavedTensorDefaultHooks::lazy_initialize();
  at::SavedTensorDefaultHooks::push_hooks(safe(pack), safe(unpack));
}

// Calls a function that fills handles; an error that it ends with stays set.
inline void call_filling(PyObject* rerun, PyObject* function, PyObject* args) {
  Ref fill = Ref::made(PyCFunction_New(&fill_method, rerun));
  push_hooks(fill, as_it_is);
  Py_XDECREF(PyObject_CallObject(function, args));
  ErrorAside error;
  at::SavedTensorDefaultHooks::pop_hooks();
}

// As `Rerun.run` up to the end of the function.
inline void run_again(PyObject* frame, PyObject* rerun) {
  PyObject* around = region::surroundings.of(frame);
  at::AutoGradMode gradients(true);
  InContext context(around::ambient.of(around));
  Restored restored(around);
  try {
    Ref args = rebuilt_arguments(around::arguments.of(around));
    restored.enter_ambient();
    rerun::externals.set(rerun, restored.enter_state());
    call_filling(rerun, region::function.of(frame), args);
  } catch (...) {
    restored.close();
    throw;
  }
  restored.close();
}

// Whether a function is Python, so that hooks find a frame that calls an operator, even in
// a thread of autograd's own.
inline bool is_python(PyObject* function) {
  return PyFunction_Check(function) || PyMethod_Check(function) || is_module(function);
}

// Whether a recompute needs nothing but what is done here.
inline bool is_usual_rerun(PyObject* frame) {
  PyObject* held = around::arguments.of(region::surroundings.of(frame));
  return is_python(region::function.of(frame)) && region::fingerprints.is_none(frame) &&
      region::trace.is_none(frame) && region::contexts.is_none(frame) && !region::is_new.is_true(frame) &&
      !region::nested_backward.is_true(frame) &&
      !given::is_nested.is_true(held) &&
      PyDict_GET_SIZE(given::kwargs.of(held)) == 0;
}

// Lets Python raise what a run that was not stopped has to raise.
inline void check_end(PyObject* rerun) {
  PyObject *type, *error, *trace;
  PyErr_Fetch(&type, &error, &trace);
  if (type != nullptr) {
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != nullptr) {
      PyException_SetTraceback(error, trace);
    }
    PyObject* judged = PyObject_CallMethodOneArg(rerun, judge_name, error);
    Py_DECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    Ref::made(judged);
  }
  call(rerun, check_end_name);
}

// As `Recording.last_needed`.
inline long last_needed(PyObject* handles) {
  for (Py_ssize_t i = PyList_GET_SIZE(handles) - 1; i >= 0; --i) {
    PyObject* handle = PyWeakref_GET_OBJECT(PyList_GET_ITEM(handles, i));
    if (handle != Py_None && saved::tensor.is_none(handle)) {
      return i;
    }
  }
  return -1;
}

// As `Rerun.__init__`.
inline Ref new_rerun(PyObject* frame) {
  Ref made = rerun_class.make();
  for (Slot* slot : {&rerun::externals, &rerun::failure, &rerun::fingerprints, &rerun::site,
                     &rerun::trace}) {
    slot->set(made, Py_None);
  }
  PyObject *calls = region::calls.of(frame), *options = region::options.of(frame);
  bool fills_late = calls != Py_None && calls::fills_late.is_true(calls);
  bool may_stop = options::early_stop.is_true(options) && !fills_late;
  rerun::cursor.set_number(made, 0);
  rerun::handles.set(made, region::handles.of(frame));
  rerun::is_guarded.set(made, options::guards.of(options));
  rerun::last_needed.set_number(made, last_needed(region::handles.of(frame)));
  rerun::may_stop.set(made, may_stop ? Py_True : Py_False);
  rerun::metadata.set(made, region::metadata.of(frame));
  rerun::recording.set(made, frame);
  rerun::stopped.set(made, Py_False);
  return made;
}

// Whether a run has ended because all that was needed is back; its exception is cleared.
inline bool has_stopped(PyObject* rerun) {
  if (PyErr_Occurred() && PyErr_ExceptionMatches(stop_recompute) &&
      rerun::stopped.is_true(rerun)) {
    PyErr_Clear();
  }
  return !PyErr_Occurred() && rerun::stopped.is_true(rerun) &&
      rerun::failure.is_none(rerun);
}

// As `Rerun.run`.
inline void rerun_frame(PyObject* frame) {
  Ref rerun = new_rerun(frame);
  try {
    run_again(frame, rerun);
    if (!has_stopped(rerun)) {
      if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) {
        throw_python_error();  // Such as what ends an outer recompute.
      }
      check_end(rerun);
    }
  } catch (...) {
    rerun::release(rerun);
    throw;
  }
  rerun::release(rerun);
}

} // namespace membudget
