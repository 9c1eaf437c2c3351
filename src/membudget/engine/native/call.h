// The arguments of one operator call, kept as the dispatcher passed them.
//
// Python arguments are made only if Python asks: it repeats view operators after a
// write, and replays what C++ does not.

#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/utils/tensor_dtypes.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <vector>

#include "box.h"

namespace torch::jit {
// From a header that would take seconds to compile.
TORCH_PYTHON_API pybind11::object toPyObject(c10::IValue value);
} // namespace torch::jit

namespace membudget {

// Where a tensor belongs: an argument, or an element of an argument that is a list.
struct Place {
  size_t argument;
  int element = -1;

  bool operator==(const Place& other) const {
    return argument == other.argument && element == other.element;
  }
};

// What a replay passes for an argument whose content affects no output, as `Scratch` and
// `Outline` in Python: to be overwritten, or only asked for its geometry.
struct StandIn {
  size_t argument;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;  // A kernel may be chosen by them.
  at::TensorOptions options;
  bool is_outline = false;

  at::Tensor made() const {
    return is_outline ? at::empty_strided(sizes, strides, options.device(at::kMeta))
                      : at::empty_strided(sizes, strides, options).zero_();
  }
};

// A call without its tensors: input i of the operation belongs at `places[i]`.
struct Call {
  c10::OperatorHandle target;
  std::vector<c10::IValue> stack;
  std::vector<Place> places;
  std::vector<StandIn> stand_ins = {};
};

using CallBox = Box<Call>;

// Puts a tensor, or none, where it belongs in a list that no other call shares.
inline void put_element(const c10::IValue& list, int element, const at::Tensor& tensor) {
  if (list.isTensorList()) {
    list.toTensorList().set(element, tensor);
  } else {
    list.toOptionalTensorList().set(element, tensor);
  }
}

inline c10::IValue copied_list(const c10::IValue& list) {
  return list.isTensorList() ? c10::IValue(list.toTensorList().copy())
                             : c10::IValue(list.toOptionalTensorList().copy());
}

// Python sees a number where the dispatcher sees a tensor that wraps one.
inline bool is_tensor(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

// A number that the dispatcher has wrapped, in memory that is not of torch's allocator: nobody
// holds that of a sum, and a tape would until its backward.
inline c10::IValue number_apart(const c10::IValue& argument) {
  if (!argument.isTensor() || !argument.toTensor().defined() || is_tensor(argument.toTensor())) {
    return argument;
  }
  const at::Tensor& number = argument.toTensor();
  char* memory = new char[number.itemsize()];
  std::memcpy(memory, number.const_data_ptr(), number.itemsize());
  auto free = [](void* data) { delete[] static_cast<char*>(data); };
  at::Tensor made = at::from_blob(memory, {}, free, number.options());
  made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// The arguments of a call without its tensors and what has stand-ins.
inline std::vector<c10::IValue> without_tensors(
    const c10::Stack& stack, size_t first, const std::vector<Place>& places,
    const std::vector<StandIn>& stand_ins) {
  std::vector<c10::IValue> kept;
  std::transform(stack.begin() + first, stack.end(), std::back_inserter(kept), number_apart);
  for (const StandIn& stand_in : stand_ins) {
    kept[stand_in.argument] = c10::IValue();
  }
  for (size_t i = 0; i < places.size(); ++i) {
    const Place& place = places[i];
    if (place.element < 0) {
      kept[place.argument] = c10::IValue();
      continue;
    }
    if (i == 0 || places[i - 1].argument != place.argument) {
      kept[place.argument] = copied_list(kept[place.argument]);
    }
    put_element(kept[place.argument], place.element, at::Tensor());
  }
  return kept;
}

// The arguments of a call, with `tensor_of(i)` where it had its tensors.
template <typename TensorOf>
c10::Stack filled(const Call& call, const TensorOf& tensor_of) {
  c10::Stack stack = call.stack;
  for (size_t i = 0; i < call.places.size(); ++i) {
    const Place& place = call.places[i];
    if (place.element < 0) {
      stack[place.argument] = tensor_of(i);
      continue;
    }
    if (i == 0 || call.places[i - 1].argument != place.argument) {
      stack[place.argument] = copied_list(stack[place.argument]);
    }
    put_element(stack[place.argument], place.element, tensor_of(i));
  }
  for (const StandIn& stand_in : call.stand_ins) {
    stack[stand_in.argument] = stand_in.made();
  }
  return stack;
}

inline PyObject* python_dtype(c10::ScalarType dtype) {
  return reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype));
}

inline bool is_of_type(const c10::Argument& argument, c10::TypeKind kind) {
  auto type = argument.real_type();
  if (auto optional = type->cast<c10::OptionalType>()) {
    type = optional->getElementType();
  }
  return type->kind() == kind;
}

inline Ref python_argument(const c10::Argument& argument, const c10::IValue& value) {
  if (value.isInt() && is_of_type(argument, c10::TypeKind::ScalarTypeType)) {
    return Ref::to(python_dtype(static_cast<c10::ScalarType>(value.toInt())));
  }
  return Ref::made(torch::jit::toPyObject(value).release().ptr());
}

// Puts input i where the call had a tensor.
inline void put_input(
    const Call& call, PyObject* args, PyObject* kwargs, PyObject* inputs, size_t i) {
  const Place& place = call.places[i];
  const auto& argument = call.target.schema().arguments()[place.argument];
  PyObject* input = PyList_GetItem(inputs, i);
  if (place.element >= 0) {
    PyObject* list = argument.kwarg_only()
        ? PyDict_GetItemString(kwargs, argument.name().c_str())
        : PyList_GetItem(args, place.argument);
    check(PyList_SetItem(list, place.element, Py_NewRef(input)));
  } else if (argument.kwarg_only()) {
    check(PyDict_SetItemString(kwargs, argument.name().c_str(), input));
  } else {
    check(PyList_SetItem(args, place.argument, Py_NewRef(input)));
  }
}

// call.arguments(inputs): the positional and keyword arguments, with inputs in place.
inline PyObject* arguments_of(PyObject* object, PyObject* inputs) {
  HANDLE_TH_ERRORS
  const Call& call = CallBox::of(object);
  const auto& schema = call.target.schema().arguments();
  Ref args = Ref::made(PyList_New(0));
  Ref kwargs = Ref::made(PyDict_New());
  for (size_t i = 0; i < schema.size(); ++i) {
    Ref made = python_argument(schema[i], call.stack[i]);
    check(
        schema[i].kwarg_only()
            ? PyDict_SetItemString(kwargs, schema[i].name().c_str(), made)
            : PyList_Append(args, made));
  }
  for (size_t i = 0; i < call.places.size(); ++i) {
    put_input(call, args, kwargs, inputs, i);
  }
  return PyTuple_Pack(2, (PyObject*)args, (PyObject*)kwargs);
  END_HANDLE_TH_ERRORS
}

inline PyMethodDef call_methods[] = {
    {"arguments", arguments_of, METH_O, "Return the arguments, as lists and a dict."},
    {nullptr, nullptr, 0, nullptr},
};

} // namespace membudget
