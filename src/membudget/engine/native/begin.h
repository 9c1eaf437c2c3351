// What a rerun region notes before its function runs: as `Recording.__init__`,
// `Surroundings.__init__` and what they call, in the common cases.

#pragma once

#include "reads.h"
#include "unpack.h"

#include <ATen/DeviceAccelerator.h>

namespace membudget {

// As `nothing_surrounds`.
inline bool is_alone() {
  return !at::SavedTensorDefaultHooks::get_hooks().has_value() &&
      PyLong_AsLong(attribute(forward_ad, current_level_name)) < 0;
}

// As `HeldTensor.__init__`.
inline Ref new_held(const at::Tensor& tensor) {
  Ref made = held_tensor.make();
  one_held::alias.set(made, wrapped(tensor.detach()));
  one_held::changed_by_region.set(made, Py_False);
  one_held::place.set(made, first_place);
  one_held::version.set_number(made, tensor._version());
  return made;
}

// As `HeldArguments.__init__`.
inline Ref new_arguments(PyObject* args, PyObject* kwargs) {
  PyObject* only = PyTuple_GET_SIZE(args) == 1 ? PyTuple_GET_ITEM(args, 0) : Py_None;
  // Exact, to torch, is a parameter as well.
  bool is_usual = THPVariable_CheckExact(only) && Py_TYPE(only) != parameter_type &&
      PyDict_GET_SIZE(kwargs) == 0 && is_plain(THPVariable_Unpack(only)) &&
      THPVariable_Unpack(only).requires_grad();
  if (!is_usual || !is_alone()) {
    return Ref::made(PyObject_CallFunctionObjArgs(held_arguments.type(), args, kwargs, nullptr));
  }
  Ref list = Ref::made(PyList_New(1));
  PyList_SET_ITEM((PyObject*)list, 0, new_held(THPVariable_Unpack(only)).release());
  Ref made = held_arguments.make();
  given::alone.set(made, Py_True);
  given::args.set(made, list);
  given::kwargs.set(made, kwargs);
  given::is_nested.set(made, Py_False);
  given::others.set(made, Ref::made(PyList_New(0)));
  given::tensors.set(made, std::move(list));
  return made;
}

// As `reaches_nothing`, of what has been looked at before.
inline bool reaches_nothing(PyObject* function) {
  if (!PyFunction_Check(function)) {
    return false;
  }
  auto* of = reinterpret_cast<PyFunctionObject*>(function);
  PyObject* known =
      PyDict_GetItemWithError(code_slots, Ref::made(PyLong_FromVoidPtr(of->func_code)));
  if (known == nullptr || PyList_GET_SIZE(PyTuple_GET_ITEM(known, 1)) != 0 ||
      of->func_defaults != nullptr || of->func_kwdefaults != nullptr) {
    return false;
  }
  Py_ssize_t cells = of->func_closure == nullptr ? 0 : PyTuple_GET_SIZE(of->func_closure);
  for (Py_ssize_t i = 0; i < cells; ++i) {
    PyObject* content = PyCell_GET(PyTuple_GET_ITEM(of->func_closure, i));
    if (content != nullptr && !is_inert(content)) {
      return false;
    }
  }
  return true;
}

// As `Ambient.__init__`.
inline Ref new_ambient() {
  if (at::impl::PythonTorchFunctionTLS::stack_len() != 0 ||
      c10::impl::TorchDispatchModeTLS::stack_len() != 0) {
    return Ref::made(PyObject_CallNoArgs(ambient_class.type()));
  }
  Ref made = ambient_class.make();
  ambient::function_modes.set(made, no_targets);
  ambient::dispatch_modes.set(made, no_targets);
  ambient::settings.set(made, settings_now());
  ambient::context.set(made, Ref::made(PyContext_CopyCurrent()));
  return made;
}

// The global generators of a process without an accelerator.
inline PyObject* sources_of(bool is_guarded) {
  static PyObject* found[3];
  int has_numpy = PyDict_Contains(sys_modules, numpy_random_name);
  check(has_numpy);
  PyObject*& known = found[is_guarded ? has_numpy : 2];
  if (known == nullptr) {
    known = Ref::made(is_guarded ? PyObject_CallNoArgs(global_sources)
                                 : PyObject_CallOneArg(torch_sources, no_targets))
                .release();
  }
  return known;
}

// Notes what a function reaches; false if there are generators among it.
inline bool note_reached(PyObject* made, PyObject* function) {
  PyObject* others = given::others.of(around::arguments.of(made));
  if (PyList_GET_SIZE(others) == 0 && reaches_nothing(function)) {
    return true;
  }
  Ref found = Ref::made(PyObject_CallFunctionObjArgs(reach, function, others, nullptr));
  if (found != nothing_reached) {
    call(made, note_reached_name, (PyObject*)found);
  }
  return PyList_GET_SIZE(reached::generators.of(found)) == 0;
}

inline Ref noted_by_python(PyObject* function, PyObject* args, PyObject* kwargs, PyObject* of) {
  return Ref::made(PyObject_CallFunctionObjArgs(
      surroundings_class.type(), function, args, kwargs, of, nullptr));
}

inline Ref bare_surroundings(PyObject* function) {
  Ref made = surroundings_class.make();
  for (Slot* slot : {&around::ambient, &around::autocast, &around::private_, &around::random_log,
                     &around::reads, &around::stream}) {
    slot->set(made, Py_None);
  }
  for (Slot* slot : {&around::is_checked, &around::is_lazy, &around::needs_repair,
                     &around::runs_torchscript}) {
    slot->set(made, Py_False);
  }
  around::trainable.set(made, Py_True);
  around::function.set(made, function);
  return made;
}

// As `Surroundings.__init__`.
inline Ref new_surroundings(PyObject* function, PyObject* args, PyObject* kwargs, PyObject* of) {
  bool is_guarded = options::guards.is_true(of);
  if (options::use_reentrant.is_true(of) || !options::preserve_rng_state.is_true(of) ||
      at::getAccelerator().has_value() || (is_guarded && is_shared_now())) {
    return noted_by_python(function, args, kwargs, of);
  }
  Ref made = bare_surroundings(function);
  if (is_autocast_on()) {
    around::autocast.set(made, Ref::made(PyObject_CallNoArgs(autocast_class)));
  }
  if (is_guarded) {
    around::ambient.set(made, new_ambient());
  }
  around::arguments.set(made, new_arguments(args, kwargs));
  if (is_guarded && !note_reached(made, function)) {
    return noted_by_python(function, args, kwargs, of);
  }
  PyObject* sources = sources_of(is_guarded);
  around::sources.set(made, sources);
  around::noted.set(made, note_generators(sources));
  return made;
}

// begun(function, args, kwargs, options, statistics, calls): a new `RerunFrame`.
inline PyObject* begun(PyObject*, PyObject* const* given, Py_ssize_t) {
  HANDLE_TH_ERRORS
  Ref made = region_frame.make();
  region::function.set(made, given[0]);
  region::options.set(made, given[3]);
  region::statistics.set(made, given[4]);
  region::calls.set(made, given[5]);
  region::surroundings.set(made, new_surroundings(given[0], given[1], given[2], given[3]));
  region::handles.set(made, Ref::made(PyList_New(0)));
  region::metadata.set(made, Ref::made(PyList_New(0)));
  region::lock.set(made, Ref::made(PyObject_CallNoArgs(lock_class)));
  for (Slot* slot : {&region::contexts, &region::fingerprints, &region::trace}) {
    slot->set(made, Py_None);
  }
  for (Slot* slot : {&region::finished, &region::holds, &region::is_new, &region::nested_backward}) {
    slot->set(made, Py_False);
  }
  return made.release();
  END_HANDLE_TH_ERRORS
}

} // namespace membudget
