// Run an operator and record its outputs, the second half of `Recorder.observe`.

#pragma once

#include "draws.h"

namespace membudget {

inline bool is_whole(at::ScalarType dtype) {
  return dtype == at::kBool || dtype == at::kLong || dtype == at::kInt ||
      dtype == at::kShort || dtype == at::kChar;
}

// The policy's answer for an operator's outputs; `None` if it must see each of them.
inline PyObject* decided(PyObject* of, const Operator& known) {
  PyObject* found = PyDict_GetItemWithError(recording::decisions.of(of), known.facts);
  if (found != nullptr) {
    return found;
  }
  return call(of, decided_name, known.facts, known.overload);  // The record owns it.
}

inline bool is_unrepeatable(const Observed& call, long index) {
  PyObject* known = recording::unrepeatable.of(call.recording);
  if (PySet_GET_SIZE(known) == 0) {
    return false;
  }
  PyObject* operation = recording::place.of(call.recording);
  Ref output = pair(operation, number(index));
  int is_known = PySet_Contains(known, output);
  check(is_known);
  return is_known == 1;
}

// Asks a policy that looks at the operator and its number, not at the arguments.
inline Ref asked(const Observed& call, const at::Tensor& output, long index) {
  PyObject* numbers = recording::numbers.of(call.recording);
  PyObject* operation = recording::place.of(call.recording);
  if (numbers != Py_None && PyDict_GetItemWithError(numbers, operation) == nullptr) {
    return Ref::to(Py_False);
  }
  return membudget::call(
      call.recording, asks_name, call.known.overload, (PyObject*)wrapped(output),
      (PyObject*)number(index));
}

// As `ForwardRecord.keeps`.
inline Ref keeps(
    const Observed& call, PyObject* operation, const at::Tensor& output, long index) {
  bool is_choice =
      call.reads_floats && is_whole(output.scalar_type()) && !call.known.is_random;
  bool leaves_device = call.known.is_copy && call.reads_device && output.is_cpu();
  if (operation::decides.is_true(operation) || is_choice || leaves_device ||
      is_unrepeatable(call, index)) {
    return Ref::to(Py_True);
  }
  PyObject* known = decided(call.recording, call.known);
  Ref answer = known == Py_None ? asked(call, output, index) : Ref::to(known);
  add(recording::kept, call.recording, answer != Py_False);
  return answer;
}

// As `ForwardRecord.hold`, if the answer is to keep an output at all.
inline void hold_if_kept(
    const Observed& call,
    PyObject* operation,
    const at::Tensor& output,
    PyObject* entry,
    long index) {
  Ref answer = keeps(call, operation, output, index);
  if (answer == Py_True) {
    hold_value(call.tracker, output, entry);
  } else if (answer != Py_False) {
    membudget::call(
        call.recording, hold_name, (PyObject*)wrapped(output), entry, (PyObject*)answer);
  }
}

// As `ForwardRecord.note_fresh`.
inline void note_fresh(
    const Observed& call,
    PyObject* operation,
    const at::Tensor& output,
    PyObject* object,
    long index) {
  Ref value = new_output(operation, index, Py_None);
  Ref memory = new_memory(value, python_dtype(output.scalar_type()));
  Ref address = number(address_of(output));
  Ref entry = enter(call.tracker, output, object, value, memory, address);
  hold_if_kept(call, operation, output, entry, index);
}

// Records an output that shares the memory of an argument.
inline void note_alias(
    const Observed& call,
    PyObject* operation,
    const at::Tensor& output,
    PyObject* object,
    long index,
    size_t argument) {
  PyObject* base = call.tensors[argument];
  Ref entry = entry_of(call.tracker, THPVariable_Unpack(base), base);
  Ref value = new_output(operation, index, root_of(entry::value.of(entry)));
  PyObject* memory = entry::memory.of(entry);
  enter(call.tracker, output, object, value, memory, number(call.addresses[argument]));
}

inline void note_output(
    const Observed& call, PyObject* operation, const at::Tensor& output, long index) {
  Ref object = wrapped(output);
  Ref key = Ref::made(PyLong_FromVoidPtr(object));
  int is_known = PyDict_Contains(tracker::table.of(call.tracker), key);
  check(is_known);
  if (is_known == 1) {
    return;
  }
  for (size_t i = 0; i < call.addresses.size(); ++i) {
    if (call.addresses[i] == address_of(output)) {
      note_alias(call, operation, output, object, index, i);
      return;
    }
  }
  note_fresh(call, operation, output, object, index);
}

// As `flat_outputs`; what is no tensor counts, but is undefined here.
inline std::vector<at::Tensor> flat_outputs(const c10::Stack& stack, size_t returns) {
  std::vector<at::Tensor> flat;
  for (size_t i = stack.size() - returns; i < stack.size(); ++i) {
    if (stack[i].isTensorList()) {
      for (const at::Tensor& tensor : stack[i].toTensorVector()) {
        flat.push_back(tensor);
      }
    } else {
      flat.push_back(stack[i].isTensor() ? stack[i].toTensor() : at::Tensor());
    }
  }
  return flat;
}

// Python records outputs that are no plain tensors; the policy sees no arguments.
inline void note_in_python(
    const Observed& call, PyObject* operation, const std::vector<at::Tensor>& outputs) {
  Ref args = Ref::made(PyList_New(0));
  Ref made = Ref::made(PyList_New(0));
  Ref addresses = Ref::made(PyList_New(0));
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    check(PyList_Append(args, call.tensors[i]));
    check(PyList_Append(addresses, number(call.addresses[i])));
  }
  for (const at::Tensor& output : outputs) {
    check(PyList_Append(made, output.defined() ? wrapped(output) : Ref::to(Py_None)));
  }
  membudget::call(
      call.recording, note_outputs_name, operation, call.known.facts, (PyObject*)args,
      (PyObject*)made, (PyObject*)addresses);
}

// As `ForwardRecord.note_outputs`.
inline void note_outputs(
    const Observed& call, PyObject* operation, const std::vector<at::Tensor>& outputs) {
  bool is_choice = false;
  for (const at::Tensor& output : outputs) {
    if (output.defined() && !is_plain(output)) {
      note_in_python(call, operation, outputs);
      return;
    }
    is_choice |= output.defined() && is_whole(output.scalar_type());
  }
  if (outputs.size() > 1 && call.reads_floats && is_choice && !call.known.is_random) {
    operation::decides.set(operation, Py_True);
  }
  for (size_t index = 0; index < outputs.size(); ++index) {
    if (outputs[index].defined()) {
      note_output(call, operation, outputs[index], static_cast<long>(index));
    }
  }
}

// As `ForwardRecord.operation`.
inline Ref record_operation(Observed& call, std::vector<c10::IValue> kept) {
  return new_operation(
      call.known.overload, call.inputs,
      CallBox::make(call.target, std::move(kept), call.places, std::move(call.stand_ins)),
      next_number(call.tracker), recording::place.of(call.recording));
}

inline size_t returns(const Observed& call) {
  return call.target.schema().returns().size();
}

// Runs the operator; returns the state that it drew from, if it is random.
inline Ref run_below(const Observed& call, c10::DispatchKeySet below) {
  DrawLock lock(call.known.is_random);
  Ref drawn = call.known.is_random ? noted_state() : Ref::to(Py_None);
  WithoutGil released(call.known.kind != Kind::view);
  call.target.redispatchBoxed(below, &call.stack);
  return drawn;
}

// The value of a tensor before and after a write, and then that of all its memory.
struct Written {
  Ref before, after, root;
};

// Notes an operator for the route of its call, if that gets one; `kept` is how many
// outputs the policy had kept before.
void survey_step(
    const Observed& call, PyObject* operation, const std::vector<at::Tensor>& outputs, long kept);
void survey_write(const Observed& call, PyObject* operation, const Written& written, long kept);
void survey_held_write(const Observed& call);
void give_up_survey(PyObject* recording);

// Where an operator takes the device of what it makes.
inline int device_argument(const c10::OperatorHandle& target) {
  return target.schema().argumentIndexWithName("device").value();
}

// Runs and records an operator whose arguments have been recorded.
inline void run_fresh(Observed& call, c10::DispatchKeySet below) {
  auto arguments = kept_arguments(call);
  long kept = recording::kept.number(call.recording);
  Ref drawn = run_below(call, below);
  if (call.known.kind == Kind::constant) {
    arguments[device_argument(call.target)] = call.stack.back().toTensor().device();
  }
  Ref operation = record_operation(call, std::move(arguments));
  operation::drawn.set(operation, std::move(drawn));
  auto flat = flat_outputs(call.stack, returns(call));
  note_outputs(call, operation, flat);
  survey_step(call, operation, flat, kept);
}

// Operators that return fresh tensors, or views of an argument.
inline void observe_fresh(Observed& call, c10::DispatchKeySet below) {
  record_arguments(call);
  run_fresh(call, below);
}

} // namespace membudget
