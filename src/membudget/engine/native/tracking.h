// The common paths of `Tracker`: which tape value a live tensor has.

#pragma once

#include "tape.h"

namespace membudget {

inline PyObject *copy_of, *meet_name, *mark_read_name;
inline PyTypeObject* parameter_type = nullptr;

inline bool is_usual_class(PyObject* tensor) {
  return THPVariable_CheckExact(tensor) || Py_TYPE(tensor) == parameter_type;
}

// A dense tensor that no subclass, mode or transform has a say in.
inline bool is_plain(const at::Tensor& tensor) {
  using K = c10::DispatchKey;
  constexpr c10::DispatchKeySet special(
      {K::Python, K::PythonTLSSnapshot, K::Sparse, K::SparseCsr, K::NestedTensor,
       K::Quantized, K::MkldnnCPU, K::FuncTorchBatched, K::FuncTorchGradWrapper,
       K::Functionalize, K::Conjugate, K::Negative, K::ZeroTensor});
  return !tensor.key_set().has_any(special) && tensor.layout() == at::kStrided &&
      tensor.has_storage() && !tensor.is_inference() &&
      !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

// The tracking record of a tensor, or null if Python must meet the tensor first.
inline PyObject* current_entry(PyObject* of, PyObject* tensor, long address) {
  PyObject* found =
      PyDict_GetItemWithError(tracker::table.of(of), Ref::made(PyLong_FromVoidPtr(tensor)));
  if (found == nullptr) {
    return nullptr;
  }
  long epoch = memory::epoch.number(entry::memory.of(found));
  bool is_current =
      entry::epoch.number(found) == epoch && entry::address.number(found) == address;
  return is_current ? found : nullptr;
}

// As `Tracker.note_source`.
inline void note_source(PyObject* of, PyObject* value) {
  if (value::is_needed.is_true(value) && value::operation.is_none(value)) {
    check(PyList_Append(tracker::sources.of(of), weak(value)));
  }
}

// As `Tracker._need`.
inline void need(PyObject* of, PyObject* value) {
  if (!value::is_needed.is_true(value)) {
    value::is_needed.set(value, Py_True);
    note_source(of, value);
  }
}

// As `Tracker.mark_read`.
inline Ref mark_read(PyObject* of, PyObject* tensor, PyObject* entry) {
  PyObject* value = entry::value.of(entry);
  if (is_empty(value)) {
    return call(of, mark_read_name, tensor, entry);
  }
  if (!value::is_used.is_true(value)) {
    value::is_used.set(value, Py_True);
    need(of, value);
    need(of, root_of(value));
  }
  return Ref::to(value);
}

// As `Tracker._new_place`.
inline Ref new_place(
    PyObject* of, const at::Tensor& tensor, PyObject* memory, PyObject* address) {
  Ref storage = Ref::made(THPStorage_Wrap(tensor.storage()));
  Ref made = Ref::made(PyObject_CallFunctionObjArgs(
      live_storage.type(), (PyObject*)storage, tracker::freed.of(of), nullptr));
  place::address.set(made, address);
  place::memory.set(made, memory);
  place::entries.set(made, Ref::made(PyDict_New()));
  check(PyDict_SetItem(tracker::places.of(of), address, made));
  return made;
}

// As `Tracker.enter`, for a tensor that has a storage.
inline Ref enter(
    PyObject* of,
    const at::Tensor& tensor,
    PyObject* object,
    PyObject* value,
    PyObject* memory,
    PyObject* address) {
  Ref made = Ref::made(PyObject_CallFunctionObjArgs(
      live_tensor.type(), object, tracker::forget.of(of), nullptr));
  Ref key = Ref::made(PyLong_FromVoidPtr(object));
  entry::key.set(made, key);
  entry::value.set(made, value);
  entry::memory.set(made, memory);
  entry::epoch.set(made, memory::epoch.of(memory));
  entry::address.set(made, address);
  check(PyDict_SetItem(tracker::table.of(of), key, made));
  Ref at = Ref::to(PyDict_GetItemWithError(tracker::places.of(of), address));
  if (at == nullptr || place::memory.of(at) != memory) {
    at = new_place(of, tensor, memory, address);
  }
  check(PyDict_SetItem(place::entries.of(at), key, made));
  return made;
}

// As `alias`: a leaf of autograd's graph stands for itself.
inline bool is_own_alias(const at::Tensor& tensor, PyObject* object) {
  return !tensor.is_view() && tensor.is_leaf() &&
      (tensor.requires_grad() || Py_TYPE(object) == parameter_type);
}

// As `alias`: what to hold for a tensor.
inline at::Tensor alias_of(const at::Tensor& tensor, PyObject* object) {
  return is_own_alias(tensor, object) ? tensor : detached(tensor);
}

// As `Tracker._source`, in memory that is no running statistic.
inline Ref new_source(const at::Tensor& tensor, PyObject* object, PyObject* memory) {
  Ref made = new_value(Py_None, 0, Py_None);
  value::is_input.set(made, Py_True);
  bool is_own = (memory::is_external.is_true(memory) || Py_TYPE(object) == parameter_type) &&
      is_own_alias(tensor, object);
  hold(made, is_own ? Ref::to(object) : wrapped(detached(tensor)));
  if (is_own) {
    value::address.set_number(made, address_of(tensor));
  }
  append(memory::sources, memory, weak(made));
  return made;
}

inline bool have_same_geometry(const at::Tensor& one, const at::Tensor& other) {
  return one.dtype() == other.dtype() && one.sizes() == other.sizes() &&
      one.strides() == other.strides() && one.storage_offset() == other.storage_offset();
}

// Whether two tensors span the same memory from its begin, element by element.
inline bool span_the_same(const at::Tensor& one, const at::Tensor& other) {
  return one.dtype() == other.dtype() && one.numel() == other.numel() &&
      one.is_contiguous() && other.is_contiguous() && one.storage_offset() == 0 &&
      other.storage_offset() == 0;
}

// As `copy_of`, without Python in the common case.
inline at::Tensor copied(const at::Tensor& tensor) {
  if (!is_plain(tensor)) {
    return THPVariable_Unpack(
        (PyObject*)Ref::made(PyObject_CallOneArg(copy_of, wrapped(tensor))));
  }
  at::Tensor alias = tensor.detach();
  if (alias.is_contiguous() && alias.storage_offset() == 0) {
    return alias.clone();
  }
  // The whole storage: view operators may read beyond this tensor.
  auto elements = static_cast<int64_t>(alias.storage().nbytes() / alias.itemsize());
  return alias.as_strided({elements}, {1}, 0)
      .clone()
      .as_strided(alias.sizes(), alias.strides(), alias.storage_offset());
}

inline Ref copied(const Ref& tensor) {
  return wrapped(copied(THPVariable_Unpack((PyObject*)tensor)));
}

// As `LiveStorage.entry_like`, among the entries that no write has outdated.
inline PyObject* entry_like(PyObject* at, const at::Tensor& tensor) {
  PyObject *key, *entry;
  for (Py_ssize_t i = 0; PyDict_Next(place::entries.of(at), &i, &key, &entry);) {
    PyObject* object = PyWeakref_GET_OBJECT(entry);
    if (object == Py_None || !THPVariable_CheckExact(object) ||
        entry::epoch.number(entry) != memory::epoch.number(entry::memory.of(entry))) {
      continue;
    }
    const at::Tensor& other = THPVariable_Unpack(object);
    if (is_plain(other) && have_same_geometry(tensor, other) &&
        address_of(other) == place::address.number(at)) {
      return entry;
    }
  }
  return nullptr;
}

// As `Tracker.meet`, for a tensor from outside or an alias of one that is tracked; null
// if Python must meet it.
inline Ref meet(PyObject* of, const at::Tensor& tensor, PyObject* object) {
  if (!is_plain(tensor) || !is_usual_class(object)) {
    return Ref();
  }
  Ref address = number(address_of(tensor));
  PyObject* at = PyDict_GetItemWithError(tracker::places.of(of), address);
  Ref memory = at == nullptr ? new_memory(Py_None, Py_None)
                             : Ref::to(place::memory.of(at));
  Ref value;
  if (memory::root.is_none(memory)) {
    if (memory::is_state.is_true(memory)) {
      return Ref();
    }
    value = new_source(tensor, object, memory);
  } else if (PyObject* entry = entry_like(at, tensor)) {
    value = Ref::to(entry::value.of(entry));
  } else {
    return Ref();
  }
  return enter(of, tensor, object, value, memory, address);
}

// Counts one more operation on the tape; returns its number.
inline PyObject* next_number(PyObject* of) {
  add(tracker::clock, of, 1);
  return tracker::clock.of(of);
}

// As `Tracker._rebased`; null if Python recorded one of the views. A chain of views may be
// longer than the stack is deep.
inline Ref rebased(PyObject* of, PyObject* value, PyObject* root) {
  std::vector<PyObject*> views;
  while (!value::root.is_none(value) && !value::operation.is_none(value)) {
    PyObject* made_by = value::operation.of(value);
    if (operation::native.is_none(made_by)) {
      return Ref();
    }
    views.push_back(value);
    value = PyList_GET_ITEM(operation::inputs.of(made_by), 0);
  }
  Ref made = Ref::to(root);
  for (auto view = views.rbegin(); view != views.rend(); ++view) {
    PyObject* made_by = value::operation.of(*view);
    Ref inputs = new_list();
    check(PyList_Append(inputs, made));
    Ref again = new_operation(
        operation::overload.of(made_by), inputs, Ref::to(operation::native.of(made_by)),
        next_number(of), zero);
    made = new_output(again, value::index.number(*view), root);
  }
  return made;
}

// As `Tracker.meet`, of a tensor that a write has outdated; null if Python must meet it.
inline Ref meet_again(PyObject* of, const at::Tensor& tensor, PyObject* object, PyObject* old) {
  Ref address = number(address_of(tensor));
  PyObject* at = PyDict_GetItemWithError(tracker::places.of(of), address);
  PyObject* memory = entry::memory.of(old);
  if (at == nullptr || place::memory.of(at) != memory || memory::root.is_none(memory)) {
    return Ref();
  }
  Ref value = rebased(of, entry::value.of(old), memory::root.of(memory));
  if (value == nullptr) {
    return Ref();
  }
  return enter(of, tensor, object, value, memory, address);
}

// As `Tracker.entry`.
inline Ref entry_of(PyObject* of, const at::Tensor& tensor, PyObject* object) {
  PyObject* found = current_entry(of, object, address_of(tensor));
  if (found != nullptr) {
    return Ref::to(found);
  }
  Ref key = Ref::made(PyLong_FromVoidPtr(object));
  PyObject* old = PyDict_GetItemWithError(tracker::table.of(of), key);
  Ref met = old == nullptr ? meet(of, tensor, object)
                           : meet_again(of, tensor, object, old);
  return met != nullptr ? met : call(of, meet_name, object, old ? old : Py_None);
}

// As `Tracker.hold_value`.
inline void hold_value(PyObject* of, const at::Tensor& tensor, PyObject* entry) {
  Ref value = Ref::to(entry::value.of(entry));
  PyObject* memory = entry::memory.of(entry);
  hold(value, wrapped(detached(tensor)));
  memory::root.set(memory, Py_None);
  append(memory::sources, memory, weak(value));
  note_source(of, value);
}

// As `Tracker.after_write`.
inline void after_write(PyObject* memory, PyObject* root) {
  add(memory::epoch, memory, 1);
  if (memory::is_external.is_true(memory)) {
    memory::is_state.set(memory, Py_True);
  }
  memory::root.set(memory, root);
}

} // namespace membudget
