// What an operator returns, by its shape function, remembered by its operands.
//
// The results of a launch need memory before their values exist. The operator's kernel
// for the device "meta" says whether their shapes are known without values; the CPU's
// kernel, run on zeros, says how it lays them out, which for some differs. Both take up
// to a millisecond, so what they say is kept, by operator and by whatever of the operands
// can change it: layouts, data types, integers; of a number only its type, unless the
// operator has no tensor among its operands, as `arange` has none.

#pragma once

#include <unordered_map>

#include "operands.h"

namespace emulated {

struct Layout {
  bool defined = true;
  std::vector<int64_t> sizes = {};
  std::vector<int64_t> strides = {};
  at::ScalarType type = at::kFloat;
};

struct Result {
  std::optional<size_t> operand = {};  // That it is, changed in place.
  bool is_list = false;
  std::vector<Layout> tensors = {};
};

struct Shapes {
  bool known = false;  // If not, the host waits and looks, as after `nonzero`.
  std::vector<Result> results = {};
  std::vector<std::pair<size_t, std::vector<int64_t>>> resized = {};  // Operands.
};

class Signature {
 public:
  Signature(const c10::OperatorHandle& op, c10::ArrayRef<IValue> operands) {
    add(reinterpret_cast<intptr_t>(&op.schema()));
    const auto& formal = op.schema().arguments();
    bool has_tensor = false;
    for (size_t i = 0; i < operands.size(); ++i)
      if (!formal[i].is_out())
        each_tensor(operands[i], [&](const Tensor&) { has_tensor = true; });
    for (size_t i = 0; i < operands.size(); ++i) {
      const auto kind = formal[i].type()->kind();
      const bool number =
          kind == c10::TypeKind::NumberType || kind == c10::TypeKind::FloatType;
      add(operands[i], !(number && has_tensor));
    }
  }

  const std::string& text() const { return text_; }

 private:
  void add(int64_t number) {
    text_.append(reinterpret_cast<const char*>(&number), sizeof number);
  }
  void add(c10::IntArrayRef numbers) {
    add(static_cast<int64_t>(numbers.size()));
    for (auto number : numbers) add(number);
  }
  void add(const Tensor& tensor) {
    if (!tensor.defined()) return add(int64_t{-1});
    add(static_cast<int64_t>(tensor.scalar_type()) << 8 |
        static_cast<int64_t>(tensor.is_cpu()) << 3 |
        static_cast<int64_t>(tensor.unsafeGetTensorImpl()->is_wrapped_number()) << 2 |
        static_cast<int64_t>(tensor.is_conj()) << 1 |
        static_cast<int64_t>(tensor.is_neg()));
    add(tensor.sizes());
    add(tensor.strides());
  }
  void add(const IValue& value, bool with_value) {
    text_ += value.tagKind();
    each_tensor(value, [&](const Tensor& tensor) { add(tensor); });
    if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) return;
    if (value.isIntList()) return add(value.toIntVector());
    if (value.isInt() && with_value) return add(value.toInt());
    if (value.isBool()) return add(static_cast<int64_t>(value.toBool()));
    if (value.isString()) text_ += value.toStringRef();
    else if (value.isList() || (value.isScalar() && with_value)) text_ += repr(value);
  }
  static std::string repr(const IValue& value) {
    std::ostringstream stream;
    stream << std::hexfloat << value;
    return stream.str();
  }

  std::string text_;
};

// Which operand a result is, if the operator changes one in place and returns it.
inline std::optional<size_t> operand_of(const c10::FunctionSchema& schema, size_t result) {
  const auto* alias = schema.returns()[result].alias_info();
  if (!alias) return {};
  TORCH_CHECK_NOT_IMPLEMENTED(
      alias->isWrite(), "emu has no kernel for the view ", schema.operator_name());
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* other = schema.arguments()[i].alias_info();
    if (other && *other == *alias) return i;
  }
  return {};
}

inline bool is_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

class ShapeCache {
 public:
  const Shapes& of(const c10::OperatorHandle& op, c10::ArrayRef<IValue> operands) {
    Signature signature(op, operands);
    {
      Lock lock;
      auto found = known_.find(signature.text());
      if (found != known_.end()) return found->second;
    }
    auto shapes = infer(op, operands);  // Without the lock: it runs Python.
    Lock lock;
    ++inferred;
    return known_.emplace(signature.text(), std::move(shapes)).first->second;
  }

  uint64_t inferred = 0;

 private:
  static Shapes infer(const c10::OperatorHandle& op, c10::ArrayRef<IValue> operands) {
    Uncounted uncounted;
    const auto& schema = op.schema();
    for (const auto& result : schema.returns())
      if (!result.type()->isSubtypeOf(*c10::TensorType::get()) &&
          !result.type()->isSubtypeOf(*c10::ListType::ofTensors()))
        return {};
    Stack stack;
    for (const auto& operand : operands)
      stack.push_back(
          operand.isDevice()          ? IValue(c10::Device(at::kMeta))
              : operand.isGenerator() ? IValue()
                                      : mapped(operand, on_meta));
    const Stack metas = stack;
    try {
      StraightToKernels straight;
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    } catch (const std::exception&) {
      return {};  // No shape function, or one that needs the values, or an error to see.
    }
    if (schema.name().rfind("aten::", 0) == 0) ask_cpu(op, operands, &stack);
    Shapes shapes{true};
    for (size_t i = 0; i < schema.returns().size(); ++i)
      shapes.results.push_back(result(schema, i, stack[i]));
    for (size_t i = 0; i < operands.size(); ++i)
      if (operands[i].isTensor() && operands[i].toTensor().defined() &&
          metas[i].toTensor().sizes() != operands[i].toTensor().sizes())
        shapes.resized.emplace_back(i, metas[i].toTensor().sizes().vec());
    return shapes;
  }

  // Put in place of the shapes what the CPU's kernel makes of zeros, if it takes them.
  static void ask_cpu(
      const c10::OperatorHandle& op, c10::ArrayRef<IValue> operands, Stack* shapes) {
    Stack stack;
    try {
      StraightToKernels straight;
      for (size_t i = 0; i < operands.size(); ++i)
        stack.push_back(
            is_generator(op.schema().arguments()[i])
                ? IValue(at::detail::createCPUGenerator())
                : operands[i].isDevice() ? IValue(c10::Device(at::kCPU))
                                         : mapped(operands[i], zeros_on_cpu));
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    } catch (const std::exception&) {
      return;  // Such as the inverse of zeros.
    }
    *shapes = std::move(stack);
  }

  static Result result(const c10::FunctionSchema& schema, size_t i, const IValue& value) {
    if (auto operand = operand_of(schema, i)) return {operand};
    Result result{{}, value.isTensorList()};
    each_tensor(value, [&](const Tensor& t) {
      if (t.defined())
        result.tensors.push_back({true, t.sizes().vec(), t.strides().vec(), t.scalar_type()});
      else
        result.tensors.push_back({false});
    });
    return result;
  }

  std::unordered_map<std::string, Shapes> known_;
};

inline ShapeCache& shape_cache = *new ShapeCache;

}  // namespace emulated
