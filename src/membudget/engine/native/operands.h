// What a recorded operator reads and writes when it runs again.

#pragma once

#include "observe.h"
#include "replay.h"

namespace membudget {

inline PyObject* is_unpacked_once_name;

// As `Executor._is_unpacked_for_all`.
inline bool is_unpacked_for_all(PyObject* of, PyObject* value) {
  PyObject* packed = value::packed.of(value);
  if (packed == Py_None || replayer::stage.number(of) < 0) {
    return false;
  }
  Ref once = attribute(packed, is_unpacked_once_name);
  return once == Py_True;
}

// As `Executor._used`.
inline void used(PyObject* of, PyObject* value) {
  add(value::uses, value, -1);
  PyObject* root = value::root.of(value);
  if (root != Py_None) {
    add(value::view_uses, root, -1);
  }
  if (value::uses.number(value) > 0 || is_held(value) || is_unpacked_for_all(of, value)) {
    return;
  }
  value::tensor.set(value, Py_None);
  PyObject* memoised = replayer::memoised.of(of);
  if (PyDict_Contains(memoised, value) == 1) {
    check(PyDict_DelItem(memoised, value));
  }
}

// Whether a source is what it was in the forward, with nothing left to compare.
inline bool is_unchanged(PyObject* source) {
  PyObject* object = value::tensor.of(source);
  bool is_known = object != Py_None && value::content.is_none(source) &&
      is_usual_class(object);
  if (!is_known) {
    return false;
  }
  const at::Tensor& tensor = THPVariable_Unpack(object);
  if (!is_plain(tensor) || tensor.storage().nbytes() == 0) {
    return false;
  }
  bool has_version = !value::version.is_none(source);
  bool has_address = !value::address.is_none(source);
  return (!has_version || value::version.number(source) == tensor._version()) &&
      (!has_address || value::address.number(source) == address_of(tensor));
}

// As `Executor._argument`, for a value.
inline at::Tensor argument(PyObject* of, PyObject* value) {
  if (value::operation.is_none(value) && !is_unchanged(value)) {
    Ref checked = call(of, source_name, value);
    return THPVariable_Unpack((PyObject*)checked);
  }
  PyObject* tensor = value::tensor.of(value);
  TORCH_CHECK(tensor != Py_None, "a replay has freed a tensor that it needs");
  return THPVariable_Unpack(tensor);
}

// As `Executor._bases`, for the one value that a recorded write overwrites.
inline Ref writable_copy(PyObject* of, PyObject* operation, PyObject* root) {
  if (value::operation.is_none(root)) {
    return copied(wrapped(argument(of, root)));
  }
  Ref tensor = wrapped(argument(of, root));
  bool is_last_use = value::sharing.is_none(root) && value::uses.number(root) <= 1 &&
      value::view_uses.number(root) <= 0;
  if (is_last_use || call(of, may_overwrite_name, operation, root) == Py_True) {
    return tensor;
  }
  return copied(tensor);
}

// As `derived`, of a view that C++ recorded. A chain of views may be longer than the stack
// is deep.
inline at::Tensor derived(PyObject* value, PyObject* root, const at::Tensor& base) {
  std::vector<PyObject*> views;
  while (value != root) {
    PyObject* made_by = value::operation.of(value);
    TORCH_CHECK(made_by != Py_None, "a view that is overwritten has lost its operation");
    views.push_back(value);
    value = PyList_GET_ITEM(operation::inputs.of(made_by), 0);
  }
  at::Tensor made = base;
  for (auto view = views.rbegin(); view != views.rend(); ++view) {
    const Call& call = CallBox::of(operation::native.of(value::operation.of(*view)));
    c10::Stack stack = filled(call, [&](size_t) { return made; });
    call.target.callBoxed(&stack);
    made = flat_outputs(stack, stack.size())[value::index.number(*view)];
  }
  return made;
}

// The part of `written` that an operation overwrites.
inline at::Tensor target_in(PyObject* operation, const Ref& written) {
  const at::Tensor& base = THPVariable_Unpack((PyObject*)written);
  if (operation::args.is_none(operation)) {
    return base;
  }
  PyObject* target = PyList_GET_ITEM(operation::args.of(operation), 0);
  return derived(target, root_of(target), base);
}

// The recorded arguments, with tensors where the forward had them.
inline c10::Stack arguments(PyObject* of, PyObject* operation, const Ref& written) {
  PyObject* inputs = operation::inputs.of(operation);
  return filled(CallBox::of(operation::native.of(operation)), [&](size_t i) -> at::Tensor {
    return i == 0 && written != nullptr ? target_in(operation, written)
                                        : argument(of, PyList_GET_ITEM(inputs, i));
  });
}

} // namespace membudget
