// Number the values on the tape, for the route of a call that is recorded.

#pragma once

#include <unordered_map>

#include "box.h"
#include "replay.h"
#include "route.h"

namespace membudget {

struct Numbered {
  size_t number;
  Ref reference;  // Weak, to the value on the tape.
};

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

struct Survey {
  std::shared_ptr<Route> route = std::make_shared<Route>();
  std::unordered_map<PyObject*, Numbered> numbers = {};  // Of values on the tape.
  std::unordered_map<const c10::StorageImpl*, size_t> memories = {};  // Their numbers.
  std::vector<WeakStorage> storages = {};  // No other one gets the address of these.
  std::vector<Ref> handles = {};  // Weak, of the saved tensors; null for what was freed.
  long operators = 0;  // How many have run; more steps may have been added.
  bool is_whole = true;
};

using SurveyBox = Box<Survey>;
using RouteBox = Box<std::shared_ptr<const Route>>;

inline size_t memory_of(Survey& of, const at::Tensor& tensor) {
  auto [found, is_new] = of.memories.emplace(storage_of(tensor), of.storages.size());
  if (is_new) {
    of.storages.push_back(tensor.storage().getWeakStorageImpl());
    of.route->makes_memory.push_back(false);
  }
  return found->second;
}

inline size_t number_new(
    Survey& of, PyObject* value, RouteValue made, const at::Tensor& tensor) {
  size_t number = of.route->values.size();
  of.is_whole &= is_plain(tensor);
  if (of.is_whole) {
    made.memory = memory_of(of, tensor);
    made.dtype = tensor.scalar_type();
    made.device = tensor.device();
    made.geometry = Geometry::of(tensor);
    of.route->makes_memory[made.memory] =
        of.route->makes_memory[made.memory] || (made.step >= 0 && made.root < 0);
  }
  of.route->values.push_back(made);
  of.numbers.insert_or_assign(value, Numbered{number, weak(value)});
  return number;
}

// What is known of a value on the tape, or null.
inline const Numbered* numbered(const Survey& of, PyObject* value) {
  auto found = of.numbers.find(value);
  bool is_known = found != of.numbers.end() &&
      PyWeakref_GET_OBJECT(found->second.reference) == value;
  return is_known ? &found->second : nullptr;
}

// A view of memory, wherever its elements lie.
inline Call view_call(const Geometry& geometry) {
  static const auto target =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::as_strided", "");
  return {target, {c10::IValue(), geometry.sizes, geometry.strides, geometry.offset}, {{0}}};
}

// Numbers a view that was made unseen, or before the last write to its memory; -1 if the memory
// is unknown, or of another dtype.
inline long number_rebased(Survey& of, PyObject* value, const at::Tensor& tensor) {
  const Numbered* owner = numbered(of, value::root.of(value));
  Route& route = *of.route;
  if (owner == nullptr || !is_plain(tensor) ||
      route.values[owner->number].dtype != tensor.scalar_type()) {
    return -1;
  }
  long step = static_cast<long>(route.steps.size()), root = static_cast<long>(owner->number);
  size_t number = number_new(of, value, {step, root}, tensor);
  Step view{nullptr, view_operator, view_call(Geometry::of(tensor)), {owner->number},
            {static_cast<long>(number)}, at::GradMode::is_enabled(), true};
  view.number = of.operators;
  view.place = route.steps.empty() ? 0 : route.steps.back().place;
  route.steps.push_back(std::move(view));
  return static_cast<long>(number);
}

// The number of a value on the tape, which is new if it comes from outside, or is a view that
// was rebased; none is known of a value that was made unseen.
inline size_t number_of(Survey& of, PyObject* value, const at::Tensor& tensor) {
  if (const Numbered* known = numbered(of, value)) {
    return known->number;
  }
  long number = is_held(value) ? -1 : number_rebased(of, value, tensor);
  if (number >= 0) {
    return number;
  }
  of.is_whole &= is_held(value) && !value::is_state.is_true(value);
  return number_new(of, value, {}, tensor);
}

// The number of what owns the memory of a view; -1 if the value is no view.
inline long number_of_root(Survey& of, PyObject* root) {
  const Numbered* known = root == Py_None ? nullptr : numbered(of, root);
  of.is_whole &= root == Py_None || known != nullptr;
  return known == nullptr ? -1 : static_cast<long>(known->number);
}

// Numbers a value that the next step makes.
inline size_t number_made(Survey& of, PyObject* value, long root, const at::Tensor& tensor) {
  of.is_whole &= value::packed.is_none(value);
  long step = static_cast<long>(of.route->steps.size());
  return number_new(of, value, {step, root, value::operation.is_none(value)}, tensor);
}

// Numbers what an operation has made.
inline std::vector<long> number_outputs(
    Survey& of, PyObject* operation, const std::vector<at::Tensor>& made) {
  std::vector<long> numbers(made.size(), -1);
  PyObject* outputs = operation::outputs.of(operation);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(outputs); ++i) {
    Ref value = Ref::to(PyWeakref_GET_OBJECT(PyList_GET_ITEM(outputs, i)));
    if (value == Py_None) {
      continue;
    }
    long index = value::index.number(value), root = number_of_root(of, value::root.of(value));
    numbers[index] = static_cast<long>(number_made(of, value, root, made[index]));
  }
  return numbers;
}

// The numbers of a call's inputs; the first one is what it writes, if that is given.
inline std::vector<size_t> numbers_of(
    Survey& of, const Observed& call, PyObject* written = nullptr) {
  std::vector<size_t> numbers;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE((PyObject*)call.inputs); ++i) {
    PyObject* input = PyList_GET_ITEM((PyObject*)call.inputs, i);
    PyObject* value = i == 0 && written != nullptr ? written : input;
    numbers.push_back(number_of(of, value, THPVariable_Unpack((PyObject*)call.tensors[i])));
  }
  return numbers;
}

} // namespace membudget
