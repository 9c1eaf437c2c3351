// Operators that overwrite their first argument, and memory before the first write.

#pragma once

#include "observe.h"

namespace membudget {

// As `Tracker.after_write`.
inline void after_write(PyObject* memory, PyObject* root) {
  add(memory::epoch, memory, 1);
  if (memory::is_external.is_true(memory)) {
    memory::is_state.set(memory, Py_True);
  }
  memory::root.set(memory, root);
}

// The entry of a tensor that C++ can write to: the tensor spans its memory, which no
// replay reads but by the values on the tape. Null if Python must record the write.
inline PyObject* writable(
    PyObject* tracker, const Operator& known, const c10::Stack& stack, size_t first) {
  if (!tracker::writes.is_none(tracker)) {
    return nullptr;  // Verification copies or fingerprints before the write.
  }
  const at::Tensor& target = stack[first].toTensor();
  long address = address_of(target);
  PyObject* entry = current_entry(tracker, wrapped(target), address);
  if (entry == nullptr) {
    return nullptr;
  }
  PyObject* memory = entry::memory.of(entry);
  PyObject* value = entry::value.of(entry);
  bool is_whole = value::root.is_none(value) && value == memory::root.of(memory);
  if (!is_whole) {
    return nullptr;
  }
  for_each_tensor(known, stack, first, [&](const at::Tensor& tensor, Place place) {
    bool is_target = place.argument == 0;
    entry = is_target || address_of(tensor) != address ? entry : nullptr;
  });
  return entry;
}

// As `run_in_place`.
inline void observe_write(Observed& call, c10::DispatchKeySet below, PyObject* written) {
  Ref entry = Ref::to(written);
  const at::Tensor target = call.stack[call.first].toTensor();
  record_arguments(call);
  PyObject* memory = entry::memory.of(entry);
  Ref before = Ref::to(entry::value.of(entry));
  Ref operation = record_operation(call, kept_arguments(call));
  // Output 0 is the returned tensor, output 1 the written memory.
  Ref pair = Ref::made(PyTuple_Pack(2, (PyObject*)before, (PyObject*)number(1)));
  operation::targets.set(operation, Ref::made(PyTuple_Pack(1, (PyObject*)pair)));
  operation::drawn.set(operation, run_below(call, below));
  Ref root = new_output(operation, 1, Py_None);
  after_write(memory, root);
  entry::value.set(entry, root);
  entry::epoch.set(entry, memory::epoch.of(memory));
  hold_if_kept(call, operation, target, entry, 1);
}

// The recorded form of uninitialised memory: its geometry.
inline Ref empty_call(const at::Tensor& output) {
  static const auto target =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::empty_strided", "");
  std::vector<c10::IValue> kept = {
      output.sizes(), output.strides(), output.scalar_type(), c10::IValue(),
      output.device(), c10::IValue()};
  return new_call(target, std::move(kept), {});
}

// As `Recorder._run_empty`, for a plain output that is new.
inline void observe_empty(Observed& call, c10::DispatchKeySet below) {
  run_below(call, below);
  call.inputs = new_list();
  const at::Tensor& output = call.stack.back().toTensor();
  if (!is_plain(output)) {
    membudget::call(call.recorder, note_empty_name, (PyObject*)wrapped(output));
    return;
  }
  Ref object = wrapped(output);
  add(tracker::clock, call.tracker, 1);
  Ref operation = new_operation(
      empty_operator, call.inputs, empty_call(output),
      tracker::clock.of(call.tracker), recording::place.of(call.recording));
  Ref value = new_output(operation, 0, Py_None);
  Ref memory = new_memory(value, python_dtype(output.scalar_type()));
  enter(call.tracker, output, object, value, memory, number(address_of(output)));
}

} // namespace membudget
