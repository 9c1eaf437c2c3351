// The saved-tensor hooks of rerun regions: the common paths of `Recording.pack`,
// `RerunFrame._unpack` and `Rerun._pack`.

#pragma once

#include "hooks.h"

#include <torch/csrc/Device.h>
#include <torch/csrc/DynamicTypes.h>

#include <algorithm>

namespace membudget {

inline Class rerun_handle;
namespace saved {
inline Slot address, tensor, version;
}

inline Class rerun_class;
namespace rerun {
inline Slot cursor, externals, failure, fingerprints, handles, is_guarded, last_needed, may_stop,
    metadata, recording, stopped;

// As `Rerun._release`.
inline void release(PyObject* of) {
  for (Slot* slot : {&fingerprints, &handles, &metadata, &recording}) {
    slot->clear(of);
  }
}
}

inline PyObject *shape_name, *check_external_name, *fills_what_it_saved, *stop_recompute;

inline bool is_common(PyObject* object) {
  return is_usual_class(object) && is_plain(THPVariable_Unpack(object));
}

inline Ref strides_of(const at::Tensor& tensor) {
  Ref made = Ref::made(PyTuple_New(tensor.dim()));
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    PyTuple_SET_ITEM((PyObject*)made, i, number(tensor.stride(i)).release());
  }
  return made;
}

// As `metadata`.
inline Ref metadata_of(PyObject* object) {
  const at::Tensor& tensor = THPVariable_Unpack(object);
  Ref shape = Ref::made(PyObject_GetAttr(object, shape_name));
  Ref device = Ref::made(THPDevice_New(tensor.device()));
  auto* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type()));
  return Ref::made(PyTuple_Pack(
      4, (PyObject*)shape, dtype, (PyObject*)device, (PyObject*)strides_of(tensor)));
}

inline bool are_same(PyObject* numbers, at::IntArrayRef found) {
  if (PyTuple_GET_SIZE(numbers) != static_cast<Py_ssize_t>(found.size())) {
    return false;
  }
  for (size_t i = 0; i < found.size(); ++i) {
    if (PyLong_AsLongLong(PyTuple_GET_ITEM(numbers, i)) != found[i]) {
      return false;
    }
  }
  return true;
}

// Whether a tensor has exactly the metadata that the forward noted.
inline bool has_metadata(const at::Tensor& tensor, PyObject* noted) {
  PyObject* device = PyTuple_GET_ITEM(noted, 2);
  PyObject* strides = PyTuple_GET_ITEM(noted, 3);
  auto* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type()));
  return PyTuple_GET_ITEM(noted, 1) == dtype &&
      reinterpret_cast<THPDevice*>(device)->device == tensor.device() &&
      strides != Py_None && are_same(PyTuple_GET_ITEM(noted, 0), tensor.sizes()) &&
      are_same(strides, tensor.strides());
}

// The metadata to note for the next tensor: the expected tuple, if it has the same.
inline Ref noted_metadata(PyObject* object, Py_ssize_t index, PyObject* expected) {
  if (index < PyList_GET_SIZE(expected)) {
    PyObject* likely = PyList_GET_ITEM(expected, index);
    if (has_metadata(THPVariable_Unpack(object), likely)) {
      return Ref::to(likely);
    }
  }
  return metadata_of(object);
}

// pack(tensor) of the forward, bound to the handles, the metadata, the metadata that is
// expected, and `pack` in Python.
inline PyObject* drop(PyObject* of, PyObject* object) {
  HANDLE_TH_ERRORS
  if (!is_common(object)) {
    return PyObject_CallOneArg(PyTuple_GET_ITEM(of, 3), object);
  }
  Ref handle = rerun_handle.make();
  saved::tensor.set(handle, Py_None);
  PyObject* metadata = PyTuple_GET_ITEM(of, 1);
  check(PyList_Append(PyTuple_GET_ITEM(of, 0), weak(handle)));
  check(PyList_Append(
      metadata,
      noted_metadata(object, PyList_GET_SIZE(metadata), PyTuple_GET_ITEM(of, 2))));
  return handle.release();
  END_HANDLE_TH_ERRORS
}

// Whether a handle holds what it was filled with, unless Python must look.
inline bool is_filled(PyObject* handle) {
  if (!rerun_handle.is_type_of(handle) || saved::tensor.is_none(handle) ||
      !is_common(saved::tensor.of(handle)) || saved::version.is_none(handle)) {
    return false;
  }
  const at::Tensor& tensor = THPVariable_Unpack(saved::tensor.of(handle));
  return saved::version.number(handle) == tensor._version() &&
      (saved::address.is_none(handle) ||
       saved::address.number(handle) == address_of(tensor));
}

// unpack(handle), bound to `_unpack` in Python.
inline PyObject* give(PyObject* of, PyObject* handle) {
  HANDLE_TH_ERRORS
  if (!is_filled(handle) || PyList_GET_SIZE(open_groups) != 0) {
    return PyObject_CallOneArg(of, handle);
  }
  Ref tensor = Ref::to(saved::tensor.of(handle));
  saved::tensor.set(handle, Py_None);
  return tensor.release();
  END_HANDLE_TH_ERRORS
}

// Fills a handle of the forward with a tensor that was computed again.
inline void fill_one(PyObject* of, PyObject* handle, PyObject* object) {
  const at::Tensor& tensor = THPVariable_Unpack(object);
  saved::tensor.set(handle, object);
  saved::version.set_number(handle, tensor._version());
  saved::address.set(
      handle,
      rerun::is_guarded.is_true(of) ? number(address_of(tensor)) : Ref::to(Py_None));
  if (!rerun::externals.is_none(of)) {
    call(of, check_external_name, handle, rerun::externals.of(of));
  }
}

// Whether the operator that saves now has yet to fill what it saved.
inline bool is_filled_late() {
  auto* frame = reinterpret_cast<PyObject*>(PyEval_GetFrame());
  return Ref::made(PyObject_CallOneArg(fills_what_it_saved, frame)) == Py_True;
}

// pack(tensor) of the second forward, a method of the `Rerun`.
inline PyObject* fill(PyObject* of, PyObject* object) {
  HANDLE_TH_ERRORS
  PyObject* handles = rerun::handles.of(of);
  long index = rerun::cursor.number(of);
  if (handles == nullptr || !is_common(object) || index >= PyList_GET_SIZE(handles) ||
      !has_metadata(
          THPVariable_Unpack(object),
          PyList_GET_ITEM(rerun::metadata.of(of), index))) {
    return PyObject_CallMethodOneArg(of, pack_name, object);
  }
  rerun::cursor.set_number(of, index + 1);
  Ref handle = Ref::to(PyWeakref_GetObject(PyList_GET_ITEM(handles, index)));
  if (handle != Py_None) {
    fill_one(of, handle, object);
  }
  if (index < rerun::last_needed.number(of) || !rerun::may_stop.is_true(of) ||
      is_filled_late()) {
    Py_RETURN_NONE;
  }
  rerun::stopped.set(of, Py_True);
  // Set, not thrown: an exception of C++ takes as long as all else of a small region.
  PyErr_SetNone(stop_recompute);
  return nullptr;
  END_HANDLE_TH_ERRORS
}

inline PyMethodDef drop_method = {"drop", drop, METH_O, nullptr};
inline PyMethodDef give_method = {"give", give, METH_O, nullptr};
inline PyMethodDef fill_method = {"fill", fill, METH_O, nullptr};

// rerun_hooks(pack, unpack, handles, metadata, expected): the hooks of a forward.
inline PyObject* rerun_hooks(PyObject*, PyObject* const* given, Py_ssize_t) {
  HANDLE_TH_ERRORS
  Ref noted = Ref::made(PyTuple_Pack(4, given[2], given[3], given[4], given[0]));
  Ref pack = Ref::made(PyCFunction_New(&drop_method, noted));
  Ref unpack = Ref::made(PyCFunction_New(&give_method, given[1]));
  return PyTuple_Pack(2, (PyObject*)pack, (PyObject*)unpack);
  END_HANDLE_TH_ERRORS
}

// fill_hook(rerun): the hook that fills the handles.
inline PyObject* fill_hook(PyObject*, PyObject* of) {
  return PyCFunction_New(&fill_method, of);
}

inline void bind_hooks(const Names& names) {
  rerun_handle.bind(
      names("RerunHandle"),
      {{"address", &saved::address}, {"tensor", &saved::tensor},
       {"version", &saved::version}});
  rerun_class.bind(
      names("Rerun"),
      {{"_cursor", &rerun::cursor}, {"_externals", &rerun::externals},
       {"_failure", &rerun::failure}, {"_fingerprints", &rerun::fingerprints},
       {"_handles", &rerun::handles}, {"_is_guarded", &rerun::is_guarded},
       {"_last_needed", &rerun::last_needed}, {"_may_stop", &rerun::may_stop},
       {"_metadata", &rerun::metadata}, {"_recording", &rerun::recording},
       {"_stopped", &rerun::stopped}});
  fills_what_it_saved = names("fills_what_it_saved");
  stop_recompute = names("StopRecompute");
  open_groups = names("OPEN_GROUPS");
  parameter_type = reinterpret_cast<PyTypeObject*>(names("Parameter"));
}

} // namespace membudget
