// Draw up the route of a call while it is recorded.
//
// A route has operators that make tensors, views or uninitialised memory, and writes. With
// anything else, the call has no route.

#pragma once

#include "numbers.h"

namespace membudget {

inline Step& add_step(
    Survey& of,
    const Observed& call,
    PyObject* operation,
    std::vector<size_t> inputs,
    std::vector<long> outputs,
    long kept) {
  long number = recording::number.number(call.recording);
  of.is_whole &= number == ++of.operators && number == recording::place.number(call.recording);
  Step step{
      &call.known, operation::overload.of(operation),
      CallBox::of(operation::native.of(operation)), std::move(inputs), std::move(outputs),
      operation::grad_enabled.is_true(operation), operation::is_view.is_true(operation),
      recording::kept.number(call.recording) - kept};
  for (size_t i = 0; i < call.stood_in_for.size(); ++i) {
    step.stood_in_for.push_back(memory_of(of, call.stood_in_for[i]));
  }
  step.number = number;
  of.route->steps.push_back(std::move(step));
  return of.route->steps.back();
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

// Notes a write to what a replay makes: the memory is made anew, or the part is kept.
inline void survey_write(
    const Observed& call, PyObject* operation, const Written& written, long kept) {
  PyObject* noted = recording::survey.of(call.recording);
  if (noted != Py_None) {
    Survey& of = SurveyBox::of(noted);
    auto inputs = numbers_of(of, call, written.before);
    size_t before = inputs[0];
    inputs[0] = root_of(*of.route, before);
    bool is_kept = value::operation.is_none(written.after);
    size_t number = number_made(
        of, is_kept ? written.after : written.root, -1,
        THPVariable_Unpack((PyObject*)call.tensors[0]));
    if (!is_kept) {
      of.route->values[number].geometry = of.route->values[inputs[0]].geometry;
    }
    bool is_part = before != inputs[0];
    auto outputs = std::vector<long>{-1, static_cast<long>(number)};
    Step& step = add_step(of, call, operation, std::move(inputs), std::move(outputs), kept);
    step.part = is_part ? static_cast<long>(before) : -1;
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
    step.number = ++of.operators;
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

// The value that the plan names as an output of an operator; -1 if there is none, or if it is
// held.
inline long output_of(const Route& route, long number, size_t index) {
  auto is_before = [](const Step& step, long number) { return step.number < number; };
  auto step = std::lower_bound(route.steps.begin(), route.steps.end(), number, is_before);
  bool is_known = step != route.steps.end() && step->number == number &&
      index < step->outputs.size();
  long value = is_known ? step->outputs[index] : -1;
  return value >= 0 && !route.values[value].is_held() ? value : -1;
}

// The values that a stage retains, of the outputs that the plan names for it.
inline std::vector<bool> retained_of(const Route& route, PyObject* outputs) {
  std::vector<bool> found(route.values.size());
  Ref named = Ref::made(PySequence_Fast(outputs, "outputs"));
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE((PyObject*)named); ++i) {
    PyObject* output = PySequence_Fast_GET_ITEM((PyObject*)named, i);
    long value = output_of(
        route, PyLong_AsLong(PyTuple_GET_ITEM(output, 0)),
        PyLong_AsSize_t(PyTuple_GET_ITEM(output, 1)));
    if (value >= 0) {
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
  long operators = PyLong_AsLong(given[1]);
  size_t saved = PyLong_AsSize_t(given[2]);
  if (!of.is_whole || of.operators != operators ||
      of.route->saves.size() != saved) {
    Py_RETURN_NONE;
  }
  of.route->needs = needs_of(*of.route);
  of.route->retained = retained_by(*of.route, given[3]);
  note_written(*of.route);
  forget_geometry(*of.route);
  return RouteBox::make(of.route).release();
  END_HANDLE_TH_ERRORS
}

} // namespace membudget
