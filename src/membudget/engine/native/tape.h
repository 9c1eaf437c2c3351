// The Python classes of the tape, and how the recorder makes their instances.
//
// The classes are those of `tape.py`, `living.py` and `aliasing.py`, whose docstrings
// explain every attribute. Python and C++ work on the same objects, so that either may
// record, change or replay what the other has recorded.

#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#include "call.h"
#include "python.h"
#include "streams.h"

namespace membudget {

inline Class tape_value;
namespace value {
inline Slot address, content, index, is_carried, is_input, is_needed, is_state, is_used, operation,
    packed, plan, reads, root, sharing, tensor, uses, version, view_uses, views;
}

inline Class tape_operation;
namespace operation {
inline Slot args, call, decides, default_dtype, drawn, grad_enabled, inputs,
    is_foreign, is_view, kwargs, native, number, overload, outputs, plan, stream, targets;
}

inline Class recorded_memory;
namespace memory {
inline Slot dtype, epoch, is_external, is_state, root, sources;
}

inline Class live_storage;
namespace place {
inline Slot address, entries, memory;
}

inline Class live_tensor;
namespace entry {
inline Slot address, epoch, key, memory, value;
}

inline Class live_tracker;
namespace tracker {
inline Slot clock, forget, freed, places, sources, table, writes;
}

inline PyObject *no_targets, *zero;
inline PyObject *empty_operator, *view_operator;

inline Ref number(long value) {
  return Ref::made(PyLong_FromLong(value));
}

inline Ref weak(PyObject* object) {
  return unvisited(Ref::made(PyWeakref_NewRef(object, nullptr)));
}

inline Ref wrapped(const at::Tensor& tensor) {
  return Ref::made(THPVariable_Wrap(tensor));
}

inline const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.storage().unsafeGetStorageImpl();
}

// What `address_of` returns in Python.
inline long address_of(const at::Tensor& tensor) {
  return reinterpret_cast<long>(storage_of(tensor));
}

inline PyObject* root_of(PyObject* of) {
  PyObject* root = value::root.of(of);
  return root == Py_None ? of : root;
}

inline bool is_empty(PyObject* of) {
  PyObject* made_by = value::operation.of(root_of(of));
  return made_by != Py_None && operation::overload.of(made_by) == empty_operator;
}

// Appends to a list that is `None` as long as it is empty.
inline void append(const Slot& slot, PyObject* object, PyObject* item) {
  if (slot.is_none(object)) {
    slot.set(object, new_list());
  }
  check(PyList_Append(slot.of(object), item));
}

// As `TapeValue.is_held`.
inline bool is_held(PyObject* of) {
  return value::operation.is_none(of) && value::packed.is_none(of);
}

// As `TapeValue.__init__`.
inline Ref new_value(PyObject* made_by, long index, PyObject* root) {
  Ref made = unvisited(tape_value.make());
  value::operation.set(made, made_by);
  value::index.set_number(made, index);
  value::root.set(made, root);
  value::tensor.set(made, Py_None);
  value::packed.set(made, Py_None);
  value::is_used.set(made, Py_False);
  value::is_needed.set(made, Py_False);
  value::is_carried.set(made, Py_False);
  value::is_input.set(made, Py_False);
  value::is_state.set(made, Py_False);
  value::views.set(made, Py_None);
  value::sharing.set(made, Py_None);
  value::plan.set(made, zero);
  return made;
}

// As `TapeValue.hold`.
inline void hold(PyObject* of, Ref tensor) {
  value::operation.set(of, Py_None);
  value::root.set(of, Py_None);
  value::tensor.set(of, std::move(tensor));
  value::version.set(of, Py_None);
  value::address.set(of, Py_None);
  value::content.set(of, Py_None);
}

// As `detach_with_version`: an alias that shares the version counter.
inline at::Tensor detached(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), false));
}

// As `Operation.__init__`, for a call that C++ keeps on a stack of its own.
inline Ref new_operation(
    PyObject* overload, const Ref& inputs, Ref kept_call, PyObject* clock, PyObject* number) {
  Ref made = unvisited(tape_operation.make());
  operation::overload.set(made, overload);
  operation::args.set(made, Py_None);
  operation::kwargs.set(made, Py_None);
  operation::native.set(made, std::move(kept_call));
  operation::inputs.set(made, inputs);
  operation::number.set(made, clock);
  operation::call.set(made, number);
  operation::grad_enabled.set(made, at::GradMode::is_enabled() ? Py_True : Py_False);
  auto dtype = c10::typeMetaToScalarType(at::get_default_dtype());
  operation::default_dtype.set(
      made, reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype)));
  operation::decides.set(made, Py_False);
  operation::is_foreign.set(made, Py_False);
  operation::drawn.set(made, Py_None);
  operation::stream.set(made, Py_None);
  operation::outputs.set(made, new_list());
  operation::targets.set(made, no_targets);
  operation::plan.set(made, zero);
  operation::is_view.set(made, Py_True);
  return made;
}

// As `Operation.output`.
inline Ref new_output(PyObject* made_by, long index, PyObject* root) {
  if (root == Py_None) {
    operation::is_view.set(made_by, Py_False);
  }
  Ref made = new_value(made_by, index, root);
  Ref reference = weak(made);
  check(PyList_Append(operation::outputs.of(made_by), reference));
  if (root != Py_None) {
    append(value::views, root, reference);
  }
  return made;
}

// As `RecordedMemory.__init__`.
inline Ref new_memory(PyObject* root, PyObject* dtype) {
  Ref made = unvisited(recorded_memory.make());
  memory::root.set(made, root);
  memory::dtype.set(made, dtype);
  memory::epoch.set(made, zero);
  memory::is_external.set(made, root == Py_None ? Py_True : Py_False);
  memory::is_state.set(made, Py_False);
  memory::sources.set(made, Py_None);
  return made;
}

} // namespace membudget
