// Draw up the route of a call while it is recorded.
//
// A route has operators that make tensors, views or uninitialised memory, and writes that a
// replay can repeat in place. With anything else, the call has no route.

#pragma once

#include <unordered_map>

#include "box.h"
#include "replay.h"
#include "route.h"

namespace membudget {

struct Numbered {
  size_t number;
  Ref reference;  // Weak, to the value on the tape.
  bool owns_more = false;  // Than the part of its memory that has the number.
};

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

struct Survey {
  std::shared_ptr<Route> route = std::make_shared<Route>();
  std::unordered_map<PyObject*, Numbered> numbers = {};  // Of values on the tape.
  std::unordered_map<const c10::StorageImpl*, size_t> memories = {};  // Their numbers.
  std::vector<WeakStorage> storages = {};  // No other one gets the address of these.
  bool is_whole = true;
};

using SurveyBox = Box<Survey>;
using RouteBox = Box<std::shared_ptr<Route>>;

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

// The number of a value on the tape, which is new if it comes from outside; none is known
// of a value that was made unseen.
inline size_t number_of(Survey& of, PyObject* value, const at::Tensor& tensor) {
  if (const Numbered* known = numbered(of, value)) {
    of.is_whole &= !known->owns_more;
    return known->number;
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

inline void add_step(
    Survey& of,
    const Observed& call,
    PyObject* operation,
    std::vector<size_t> inputs,
    std::vector<long> outputs,
    long kept) {
  long number = recording::number.number(call.recording);
  of.is_whole &= number == static_cast<long>(of.route->steps.size()) + 1 &&
      number == recording::place.number(call.recording);
  Step step{
      &call.known, operation::overload.of(operation),
      CallBox::of(operation::native.of(operation)), std::move(inputs), std::move(outputs),
      operation::grad_enabled.is_true(operation), operation::is_view.is_true(operation),
      recording::kept.number(call.recording) - kept};
  for (size_t i = 0; i < call.stood_in_for.size(); ++i) {
    step.stood_in_for.push_back(memory_of(of, call.stood_in_for[i]));
  }
  of.route->steps.push_back(std::move(step));
}

inline void survey_step(
    const Observed& call, PyObject* operation, const std::vector<at::Tensor>& outputs, long kept) {
  PyObject* noted = recording::survey.of(call.recording);
  if (noted != Py_None) {
    Survey& of = SurveyBox::of(noted);
    auto inputs = numbers_of(of, call);
    add_step(of, call, operation, inputs, number_outputs(of, operation, outputs), kept);
  }
}

// Notes a write to what a replay makes. What is written owns the memory from then on, even
// if it is a part of it: a call that reads anything else of that memory has no route.
inline void survey_write(
    const Observed& call, PyObject* operation, const Written& written, long kept) {
  PyObject* noted = recording::survey.of(call.recording);
  if (noted != Py_None) {
    Survey& of = SurveyBox::of(noted);
    auto inputs = numbers_of(of, call, written.before);
    const at::Tensor& target = THPVariable_Unpack((PyObject*)call.tensors[0]);
    size_t number = number_made(of, written.after, -1, target);
    bool is_part = of.route->values[number].is_part = written.root != written.after;
    of.numbers.insert_or_assign(
        written.root, Numbered{number, weak(written.root), is_part});
    add_step(of, call, operation, inputs, {-1, static_cast<long>(number)}, kept);
  }
}

// Notes a write to memory that no replay makes.
inline void survey_held_write(const Observed& call) {
  PyObject* noted = recording::survey.of(call.recording);
  if (noted != Py_None) {
    Survey& of = SurveyBox::of(noted);
    Step step{
        &call.known, call.known.overload,
        {call.target, kept_arguments(call), call.places}, numbers_of(of, call), {},
        at::GradMode::is_enabled()};
    of.route->steps.push_back(std::move(step));
  }
}

// A call that does what a route cannot say has none.
inline void give_up_survey(PyObject* recording) {
  recording::survey.set(recording, Py_None);
}

// Notes a tensor that autograd saved, by its handle.
inline void survey_save(PyObject* recording, PyObject* handle, const at::Tensor& tensor) {
  PyObject* noted = recording::survey.of(recording);
  if (noted != Py_None) {
    Survey& of = SurveyBox::of(noted);
    size_t number = number_of(of, handle::value.of(handle), tensor);
    of.route->saves.push_back({number, of.route->steps.size(), handle::stage.number(handle)});
  }
}

// survey(): what is handed to a recording whose call gets a route.
inline PyObject* new_survey(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  return SurveyBox::make().release();
  END_HANDLE_TH_ERRORS
}

// The values that a stage retains, of the outputs that the plan names for it.
inline std::vector<bool> retained_of(const Route& route, PyObject* outputs) {
  std::vector<bool> found(route.values.size());
  Ref named = Ref::made(PySequence_Fast(outputs, "outputs"));
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE((PyObject*)named); ++i) {
    PyObject* output = PySequence_Fast_GET_ITEM((PyObject*)named, i);
    size_t step = PyLong_AsSize_t(PyTuple_GET_ITEM(output, 0)) - 1;
    size_t index = PyLong_AsSize_t(PyTuple_GET_ITEM(output, 1));
    bool is_known = step < route.steps.size() && index < route.steps[step].outputs.size();
    long value = is_known ? route.steps[step].outputs[index] : -1;
    if (value >= 0 && !route.values[value].is_held()) {
      found[value] = true;
    }
  }
  return found;
}

inline std::vector<std::vector<bool>> retained_by(const Route& route, PyObject* stages) {
  std::vector<std::vector<bool>> found;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(stages); ++i) {
    found.push_back(retained_of(route, PyTuple_GET_ITEM(stages, i)));
  }
  return found;
}

// route(survey, operators, saved, stages): the route; `None` if not all was seen. For each
// stage of the backward pass, `stages` holds the outputs that it retains.
inline PyObject* route_of(PyObject*, PyObject* const* given, Py_ssize_t) {
  HANDLE_TH_ERRORS
  Survey& of = SurveyBox::of(given[0]);
  size_t operators = PyLong_AsSize_t(given[1]), saved = PyLong_AsSize_t(given[2]);
  if (!of.is_whole || of.route->steps.size() != operators ||
      of.route->saves.size() != saved) {
    Py_RETURN_NONE;
  }
  of.route->needs = needs_of(*of.route);
  of.route->retained = retained_by(*of.route, given[3]);
  if (!may_overwrite(*of.route) || !may_retain(*of.route)) {
    Py_RETURN_NONE;
  }
  return RouteBox::make(of.route).release();
  END_HANDLE_TH_ERRORS
}

} // namespace membudget
