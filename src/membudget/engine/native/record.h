// What a recorder looks at before an operator runs, and what it notes of arguments.

#pragma once

#include "operators.h"
#include "tracking.h"

namespace membudget {

inline Class recorder_class;
namespace recorder {
inline Slot fingerprinter, is_suspended, late, opaque_depth, recording;
}

inline Class forward_record;
namespace recording {
inline Slot decisions, kept, left_path, module_path, names, number, numbers, path, place, policy,
    reads_arguments, recent, routes, stages, stream, streams, survey, taken, tracker, trip,
    unrepeatable;
}

inline PyObject *advance_name, *align_name, *asks_name, *before_write_name, *decided_name, *hold_name,
    *note_empty_name, *note_outputs_name;

// One operator call while it is recorded.
struct Observed {
  PyObject* recorder;
  PyObject* recording;
  PyObject* tracker;
  const Operator& known;
  const c10::OperatorHandle& target;
  c10::Stack& stack;
  size_t first; // Index of the call's first argument on the stack.
  std::vector<Ref> tensors = {}; // The arguments that are tensors,
  std::vector<Place> places = {}; // their places among the arguments,
  std::vector<long> addresses = {}; // and their storages.
  std::vector<StandIn> stand_ins = {}; // For arguments whose content does not matter,
  std::vector<at::Tensor> stood_in_for = {}; // and these.
  Ref inputs = {}; // Their tape values, as a list.
  bool reads_floats = false;
  bool reads_device = false;
};

// Calls `visit(tensor, place)` for the tensors among a call's arguments, in order.
template <typename Visit>
void for_each_tensor(
    const Operator& known, const c10::Stack& stack, size_t first, const Visit& visit) {
  for (size_t position : known.tensors) {
    const c10::IValue& argument = stack[first + position];
    if (argument.isTensor()) {
      if (is_tensor(argument.toTensor())) {
        visit(argument.toTensor(), Place{position});
      }
    } else if (argument.isList()) {
      int element = 0;
      for (const c10::IValue& item : argument.toListRef()) {
        if (item.isTensor() && is_tensor(item.toTensor())) {
          visit(item.toTensor(), Place{position, element});
        }
        ++element;
      }
    }
  }
}

inline bool is_idle(PyObject* of) {
  return !recorder::is_suspended.is_true(of) && recorder::fingerprinter.is_none(of) &&
      recorder::opaque_depth.of(of) == zero && PyList_GET_SIZE(recorder::late.of(of)) == 0;
}

// As `ForwardRecord.align`.
inline void align(PyObject* of, const Operator& known) {
  PyObject* names = recording::names.of(of);
  if (names == Py_None) {
    recording::place.set(of, recording::number.of(of));
    return;
  }
  long place = recording::place.number(of);
  if (place < PyTuple_GET_SIZE(names) && PyTuple_GET_ITEM(names, place) == known.name) {
    recording::place.set_number(of, place + 1);
  } else {
    call(of, align_name, known.name);
  }
}

// As `ForwardRecord.advance`.
inline void advance(PyObject* of, const Operator& known) {
  PyObject* facts = known.facts;
  long number = recording::number.number(of);
  PyObject* path = recording::path.of(of);
  if (path == Py_None) {
    recording::number.set_number(of, number + 1);
    PyObject* taken = recording::taken.of(of);
    if (taken != Py_None) {
      check(PyList_Append(taken, facts));
    }
  } else if (number < PyTuple_GET_SIZE(path) && PyTuple_GET_ITEM(path, number) == facts) {
    recording::number.set_number(of, number + 1);
    PyObject* recent = recording::recent.of(of);
    check(PyList_SetSlice(recent, 0, PyList_GET_SIZE(recent), nullptr));
  } else {
    call(of, advance_name, facts);
    return;
  }
  align(of, known);
}

// Notes one tensor among the arguments, with its value as the operation's next input.
inline void note_argument(
    Observed& call, const at::Tensor& tensor, Ref object, Place place, Ref value) {
  check(PyList_Append(call.inputs, value));
  call.tensors.push_back(std::move(object));
  call.places.push_back(place);
  call.addresses.push_back(address_of(tensor));
  call.reads_floats |= tensor.is_floating_point() || tensor.is_complex();
  call.reads_device |= !tensor.is_cpu();
}

// Whether the content of an argument does not matter: a constant is only made in its
// shape, or it is a running statistic that a normalisation in training updates.
inline bool has_stand_in(const Observed& call, Place place) {
  if (call.known.kind == Kind::constant) {
    return place.argument == 0;
  }
  return call.known.kind == Kind::normalisation &&
      (place.argument == 3 || place.argument == 4) &&
      call.stack[call.first + 5].toBool();
}

// As `ForwardRecord.record_tensors`; a view reads nothing, a write is noted apart.
inline void record_arguments(Observed& call) {
  call.inputs = new_list();
  auto visit = [&](const at::Tensor& tensor, Place place) {
    if (has_stand_in(call, place)) {
      bool is_outline = call.known.kind == Kind::constant;
      call.reads_floats |= tensor.is_floating_point() || tensor.is_complex();
      call.stand_ins.push_back(
          {place.argument, tensor.sizes().vec(), tensor.strides().vec(), tensor.options(),
           is_outline});
      call.stood_in_for.push_back(tensor);
      return;
    }
    Ref object = wrapped(tensor);
    Ref entry = entry_of(call.tracker, tensor, object);
    bool is_read = call.known.kind != Kind::view &&
        (!call.known.writes_first() || place.argument > 0);
    Ref value = is_read ? mark_read(call.tracker, object, entry)
                        : Ref::to(entry::value.of(entry));
    note_argument(call, tensor, std::move(object), place, std::move(value));
  };
  for_each_tensor(call.known, call.stack, call.first, visit);
}

// The arguments without their tensors, to be kept with the operation.
inline std::vector<c10::IValue> kept_arguments(const Observed& call) {
  return without_tensors(call.stack, call.first, call.places, call.stand_ins);
}

} // namespace membudget
