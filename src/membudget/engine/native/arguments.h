// Compare the arguments of a call with those of a step, tensors aside.

#pragma once

#include "route.h"

#include <cstring>

namespace membudget {

inline bool are_same_bytes(const void* one, const void* other, size_t bytes) {
  return std::memcmp(one, other, bytes) == 0;
}

// Whether two arguments that are no tensors of their own are the same: both undefined,
// or numbers that the dispatcher has wrapped.
inline bool are_same_numbers(const at::Tensor& one, const at::Tensor& other) {
  if (!one.defined() || !other.defined()) {
    return one.defined() == other.defined();
  }
  return !is_tensor(one) && !is_tensor(other) && one.dtype() == other.dtype() &&
      one.is_cpu() && other.is_cpu() &&
      are_same_bytes(one.const_data_ptr(), other.const_data_ptr(), one.itemsize());
}

inline bool are_same(const c10::IValue& one, const c10::IValue& other) {
  if (one.isNone() || other.isNone()) {
    return one.isNone() && other.isNone();
  }
  if (one.isInt()) {
    return other.isInt() && one.toInt() == other.toInt();
  }
  if (one.isBool()) {
    return other.isBool() && one.toBool() == other.toBool();
  }
  if (one.isDouble()) {
    double first = one.toDouble(), second = other.isDouble() ? other.toDouble() : 0;
    return other.isDouble() && are_same_bytes(&first, &second, sizeof first);
  }
  if (one.isTensor()) {
    return other.isTensor() && are_same_numbers(one.toTensor(), other.toTensor());
  }
  if (one.isList() && other.isList()) {
    auto here = one.toListRef(), there = other.toListRef();
    return std::equal(here.begin(), here.end(), there.begin(), there.end(), are_same);
  }
  if (one.isDevice()) {
    return other.isDevice() && one.toDevice() == other.toDevice();
  }
  return one.isString() && other.isString() && one.toStringRef() == other.toStringRef();
}

inline bool is_list_of_tensors(const c10::IValue& value) {
  return value.isTensorList() || value.isOptionalTensorList();
}

// Whether an argument is a number, such as a size, a dimension or a factor, or has several. Types,
// layouts and devices, of which a route depends, are none.
inline bool is_numeric(const c10::TypePtr& type) {
  if (auto optional = type->cast<c10::OptionalType>()) {
    return is_numeric(optional->getElementType());
  }
  if (auto list = type->cast<c10::ListType>()) {
    return is_numeric(list->getElementType());
  }
  switch (type->kind()) {
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
    case c10::TypeKind::FloatType:
    case c10::TypeKind::NumberType:
    case c10::TypeKind::TensorType:  // Of a number that the dispatcher has wrapped.
      return true;
    default:
      return false;
  }
}

inline bool are_numbers(const c10::IValue& one, const c10::IValue& other) {
  if (one.isTensor() && other.isTensor()) {
    const at::Tensor &first = one.toTensor(), &second = other.toTensor();
    return first.defined() && second.defined() && !is_tensor(first) && !is_tensor(second) &&
        first.dtype() == second.dtype() && first.is_cpu() && second.is_cpu();
  }
  return (one.isInt() && other.isInt()) || (one.isDouble() && other.isDouble()) ||
      (one.isIntList() && other.isIntList()) || (one.isDoubleList() && other.isDoubleList());
}

// How the arguments of two calls compare: a step is the same if only numbers are others.
enum class Alike { same, but_for_numbers, no };

inline Alike worse(Alike one, Alike other) { return std::max(one, other); }

inline Alike compared(
    const c10::OperatorHandle& target, size_t i, const c10::IValue& then, const c10::IValue& now) {
  if (are_same(then, now)) {
    return Alike::same;
  }
  bool is_number = are_numbers(then, now) &&
      is_numeric(target.schema().arguments()[i].real_type());
  return is_number ? Alike::but_for_numbers : Alike::no;
}

// Whether a constant is made on the device of the first argument, which the step names.
inline bool is_own_device(
    const Step& step, const c10::IValue& then, const c10::IValue& now, const c10::IValue& like) {
  return step.known->kind == Kind::constant && then.isDevice() && now.isNone() &&
      then.toDevice() == like.toTensor().device();
}

// How the arguments that are no tensors compare with those of the step.
inline Alike compared(const Step& step, const c10::Stack& stack, size_t first) {
  Alike found = Alike::same;
  for (size_t i = 0; i < step.call.stack.size() && found != Alike::no; ++i) {
    const c10::IValue &then = step.call.stack[i], &now = stack[first + i];
    if (now.isTensor() && is_tensor(now.toTensor())) {
      continue;
    }
    if (is_list_of_tensors(now)) {
      bool is_same = is_list_of_tensors(then) &&
          then.toListRef().size() == now.toListRef().size();
      found = worse(found, is_same ? Alike::same : Alike::no);
    } else if (!is_own_device(step, then, now, stack[first])) {
      found = worse(found, compared(step.call.target, i, then, now));
    }
  }
  return found;
}

inline Alike compared(const StandIn& one, const StandIn& other) {
  bool is_same = one.sizes == other.sizes && one.strides == other.strides;
  bool is_alike = one.argument == other.argument && one.is_outline == other.is_outline &&
      one.options.dtype() == other.options.dtype() &&
      one.options.device() == other.options.device() && (is_same || one.is_outline);
  return !is_alike ? Alike::no : is_same ? Alike::same : Alike::but_for_numbers;
}

// How the arguments of two steps compare.
inline Alike compared(const Call& one, const Call& other) {
  Alike found = one.stack.size() == other.stack.size() && one.places == other.places &&
          one.stand_ins.size() == other.stand_ins.size()
      ? Alike::same
      : Alike::no;
  for (size_t i = 0; found != Alike::no && i < one.stack.size(); ++i) {
    found = worse(found, compared(one.target, i, one.stack[i], other.stack[i]));
  }
  for (size_t i = 0; found != Alike::no && i < one.stand_ins.size(); ++i) {
    found = worse(found, compared(one.stand_ins[i], other.stand_ins[i]));
  }
  return found;
}

} // namespace membudget
