// Operators that overwrite their first argument or running statistics, and memory before
// the first write.

#pragma once

#include <algorithm>

#include "geometry.h"
#include "observe.h"

namespace membudget {

// Whether C++ recorded every view that leads from a value to the one that owns the memory.
inline bool is_native_view(PyObject* value) {
  while (!value::root.is_none(value)) {
    PyObject* made_by = value::operation.of(value);
    if (operation::native.is_none(made_by) ||
        PyList_GET_SIZE(operation::inputs.of(made_by)) != 1) {
      return false;
    }
    value = PyList_GET_ITEM(operation::inputs.of(made_by), 0);
  }
  return true;
}

// Whether a tensor is in memory that no replay recomputes.
inline bool is_held_memory(PyObject* entry) {
  return memory::root.is_none(entry::memory.of(entry));
}

// Whether C++ can record a write to memory that a replay recomputes: it overwrites nothing
// that another argument reads.
inline bool is_writable(
    PyObject* entry, const Operator& known, const c10::Stack& stack, size_t first) {
  PyObject* value = entry::value.of(entry);
  if (root_of(value) != memory::root.of(entry::memory.of(entry)) || !is_native_view(value)) {
    return false;
  }
  const at::Tensor& target = stack[first].toTensor();
  bool is_alone = true;
  for_each_tensor(known, stack, first, [&](const at::Tensor& tensor, Place place) {
    is_alone &= place.argument == 0 || storage_of(tensor) != storage_of(target) ||
        are_apart(tensor, target);
  });
  return is_alone;
}

// Notes that an operation overwrites its input 0, or what that is a view of: then a replay
// makes the view, which it finds among the arguments, of what it writes to.
inline void note_target(PyObject* operation) {
  PyObject* inputs = operation::inputs.of(operation);
  Ref root = Ref::to(root_of(PyList_GET_ITEM(inputs, 0)));
  if (root != PyList_GET_ITEM(inputs, 0)) {
    Ref arguments = Ref::made(arguments_of(operation::native.of(operation), inputs));
    operation::args.set(operation, PyTuple_GET_ITEM((PyObject*)arguments, 0));
    operation::kwargs.set(operation, PyTuple_GET_ITEM((PyObject*)arguments, 1));
    check(PyList_SetItem(inputs, 0, Ref::to(root).release()));
  }
  // Output 0 is the returned tensor, output 1 the written memory.
  Ref pair = Ref::made(PyTuple_Pack(2, (PyObject*)root, (PyObject*)number(1)));
  operation::targets.set(operation, Ref::made(PyTuple_Pack(1, (PyObject*)pair)));
}

// As `run_in_place`.
inline void observe_write(Observed& call, c10::DispatchKeySet below, const Ref& entry) {
  const at::Tensor target = call.stack[call.first].toTensor();
  record_arguments(call);
  PyObject* memory = entry::memory.of(entry);
  Ref before = Ref::to(entry::value.of(entry));
  long kept = recording::kept.number(call.recording);
  Ref operation = record_operation(call, kept_arguments(call));
  note_target(operation);
  operation::drawn.set(operation, run_below(call, below));
  Ref root = new_output(operation, 1, Py_None);
  after_write(memory, root);
  Ref after = rebased(call.tracker, before, root);
  entry::value.set(entry, after);
  entry::epoch.set(entry, memory::epoch.of(memory));
  if (memory::dtype.of(memory) != python_dtype(target.scalar_type())) {
    give_up_survey(call.recording);  // The tape could not be written.
  }
  hold_if_kept(call, operation, target, entry, 1);
  survey_write(call, operation, {before, after, root}, kept);
}

// Whether a source has content that a replay may read, and that a write would destroy.
inline bool must_be_copied(PyObject* source) {
  return source != Py_None && value::is_needed.is_true(source) &&
      !value::tensor.is_none(source);
}

// Whether a write surely leaves what a source holds as it is.
inline bool is_left(PyObject* source, const at::Tensor& written) {
  if (!must_be_copied(source) || !value::packed.is_none(source)) {
    return false;
  }
  const at::Tensor& held = THPVariable_Unpack(value::tensor.of(source));
  return is_plain(held) && is_plain(written) && are_apart(held, written);
}

// Whether a source can be copied here, or forgotten. Python looks at the views of one that is
// not used itself.
inline bool is_simple(PyObject* source, const at::Tensor& written) {
  if (source == Py_None) {
    return true;
  }
  if (!value::packed.is_none(source) || !must_be_copied(source)) {
    return value::packed.is_none(source);
  }
  const at::Tensor& held = THPVariable_Unpack(value::tensor.of(source));
  return is_plain(held) && (span_the_same(held, written) || value::is_used.is_true(source));
}

// As `_survives`, of a simple source.
inline void put_aside(PyObject* source) {
  if (must_be_copied(source)) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::Tensor& held = THPVariable_Unpack(value::tensor.of(source));
    value::tensor.set(source, wrapped(copied(held)));
    value::address.set(source, Py_None);
  }
}

// As `Tracker.before_write`, of one tensor in held memory.
inline void before_held_write(
    const Observed& call, const at::Tensor& tensor, PyObject* entry) {
  PyObject* memory = entry::memory.of(entry);
  if (memory::sources.is_none(memory)) {
    return;
  }
  std::vector<Ref> sources;
  Ref left;
  bool are_simple = true;
  PyObject* noted = memory::sources.of(memory);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(noted); ++i) {
    Ref source = Ref::to(PyWeakref_GET_OBJECT(PyList_GET_ITEM(noted, i)));
    if (is_left(source, tensor)) {
      if (left == nullptr) {
        left = new_list();
      }
      check(PyList_Append(left, PyList_GET_ITEM(noted, i)));
    } else {
      are_simple &= is_simple(source, tensor);
      sources.push_back(std::move(source));
    }
  }
  if (are_simple) {
    std::for_each(sources.begin(), sources.end(), put_aside);
    memory::sources.set(memory, left == nullptr ? Ref::to(Py_None) : std::move(left));
  } else {
    Ref written = Ref::made(PyList_New(0));
    check(PyList_Append(written, wrapped(tensor)));
    membudget::call(call.tracker, before_write_name, (PyObject*)written, Py_False);
    give_up_survey(call.recording);
  }
}

// As `run_in_place`, of memory that no replay recomputes.
inline void observe_held_write(
    Observed& call, c10::DispatchKeySet below, const Ref& entry) {
  const at::Tensor target = call.stack[call.first].toTensor();
  record_arguments(call);
  before_held_write(call, target, entry);
  survey_held_write(call);
  run_below(call, below);
  after_write(entry::memory.of(entry), Py_None);
}

// As `run_special`, of a normalisation; only in training has it running statistics.
inline void observe_normalisation(Observed& call, c10::DispatchKeySet below) {
  record_arguments(call);
  std::vector<Ref> memories;
  for (const StandIn& stand_in : call.stand_ins) {
    const at::Tensor& tensor = call.stack[call.first + stand_in.argument].toTensor();
    Ref entry = entry_of(call.tracker, tensor, wrapped(tensor));
    before_held_write(call, tensor, entry);
    memories.push_back(Ref::to(entry::memory.of(entry)));
  }
  run_fresh(call, below);
  for (const Ref& memory : memories) {
    after_write(memory, Py_None);
  }
}

// The recorded form of uninitialised memory: its geometry.
inline Ref empty_call(const at::Tensor& output) {
  static const auto target =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::empty_strided", "");
  std::vector<c10::IValue> kept = {
      output.sizes(), output.strides(), output.scalar_type(), c10::IValue(),
      output.device(), c10::IValue()};
  return CallBox::make(target, std::move(kept));
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
  Ref operation = new_operation(
      empty_operator, call.inputs, empty_call(output),
      next_number(call.tracker), recording::place.of(call.recording));
  Ref value = new_output(operation, 0, Py_None);
  Ref memory = new_memory(value, python_dtype(output.scalar_type()));
  enter(call.tracker, output, object, value, memory, number(address_of(output)));
  survey_step(call, operation, {output}, recording::kept.number(call.recording));
}

} // namespace membudget
