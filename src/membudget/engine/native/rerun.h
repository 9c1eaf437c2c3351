// The saved-tensor hooks of rerun regions: the common paths of `Recording.pack`,
// `RerunFrame._unpack` and `Rerun._pack`.

#pragma once

#include "regions.h"

#include <torch/csrc/Device.h>
#include <torch/csrc/DynamicTypes.h>

#include <algorithm>
#include <array>

namespace membudget {

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
  Ref shape = attribute(object, shape_name);
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

// The metadata to note for a tensor: the tuple of an earlier one that has the same.
inline Ref noted_metadata(PyObject* object) {
  static auto& known = *new std::array<Ref, 1024>;  // Never freed.
  const at::Tensor& tensor = THPVariable_Unpack(object);
  size_t hash = static_cast<size_t>(tensor.scalar_type());
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    hash = hash * 31 + static_cast<size_t>(tensor.size(i) * 7 + tensor.stride(i));
  }
  Ref& found = known[(hash ^ hash >> 10) % known.size()];
  if (found == nullptr || !has_metadata(tensor, found)) {
    found = metadata_of(object);
  }
  return found;
}

// pack(tensor) of the forward, a method of the frame.
inline PyObject* drop(PyObject* of, PyObject* object) {
  HANDLE_TH_ERRORS
  if (!is_common(object)) {
    return PyObject_CallMethodOneArg(of, drop_name, object);
  }
  Ref handle = unvisited(rerun_handle.make());
  saved::tensor.set(handle, Py_None);
  check(PyList_Append(region::handles.of(of), weak(handle)));
  check(PyList_Append(region::metadata.of(of), noted_metadata(object)));
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

// As `fills_what_it_saved`, of the operator that saves now.
inline bool is_filled_late() {
  PyFrameObject* frame = PyEval_GetFrame();
  if (frame == nullptr) {  // A function in C, in a thread of autograd's own.
    return false;
  }
  Ref object = Ref::made(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
  auto* code = reinterpret_cast<PyCodeObject*>((PyObject*)object);
  if (code->co_name == torch_function_name) {  // It stands for its caller.
    auto* caller = reinterpret_cast<PyObject*>(frame);
    return Ref::made(PyObject_CallOneArg(fills_what_it_saved, caller)) == Py_True;
  }
  return PySequence_Contains(code->co_names, rrelu_name) == 1;
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
inline PyMethodDef fill_method = {"fill", fill, METH_O, nullptr};

// fill_hook(rerun): the hook that fills the handles.
inline PyObject* fill_hook(PyObject*, PyObject* of) {
  return PyCFunction_New(&fill_method, of);
}

} // namespace membudget
