// The recorder of the replay engine in C++, an optional accelerator.

#include "binding.h"
#include "dead.h"
#include "run.h"
#include "sums.h"

namespace membudget {
namespace {

// A handler that drops the warning that a kernel was covered: it is meant to be.
class Quiet : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

PyObject* cover_all(PyObject*, PyObject* names) {
  HANDLE_TH_ERRORS
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  Ref listed = Ref::made(PySequence_Fast(names, "names must be a sequence"));
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE((PyObject*)listed); ++i) {
    cover(PyUnicode_AsUTF8(PySequence_Fast_GET_ITEM((PyObject*)listed, i)));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* watch(PyObject*, PyObject* observer) {
  this_thread.recorder = recorder_class.is_type_of(observer) ? observer : nullptr;
  Py_RETURN_NONE;
}

void bind_tape(const Names& names) {
  tape_value.bind(
      names("TapeValue"),
      {{"address", &value::address}, {"content", &value::content},
       {"index", &value::index}, {"is_carried", &value::is_carried},
       {"is_input", &value::is_input},
       {"is_needed", &value::is_needed}, {"is_state", &value::is_state},
       {"is_used", &value::is_used}, {"operation", &value::operation},
       {"packed", &value::packed}, {"plan", &value::plan}, {"reads", &value::reads},
       {"root", &value::root}, {"sharing", &value::sharing},
       {"tensor", &value::tensor}, {"uses", &value::uses},
       {"version", &value::version}, {"view_uses", &value::view_uses},
       {"views", &value::views}});
  tape_operation.bind(
      names("Operation"),
      {{"_args", &operation::args}, {"_inputs", &operation::inputs},
       {"_kwargs", &operation::kwargs}, {"call", &operation::call},
       {"decides", &operation::decides}, {"default_dtype", &operation::default_dtype},
       {"drawn", &operation::drawn}, {"grad_enabled", &operation::grad_enabled},
       {"is_foreign", &operation::is_foreign}, {"is_view", &operation::is_view},
       {"native", &operation::native}, {"number", &operation::number},
       {"operator", &operation::overload}, {"outputs", &operation::outputs},
       {"plan", &operation::plan}, {"stream", &operation::stream}, {"targets", &operation::targets}});
}

void bind_tracking(const Names& names) {
  recorded_memory.bind(
      names("RecordedMemory"),
      {{"dtype", &memory::dtype}, {"epoch", &memory::epoch},
       {"is_external", &memory::is_external}, {"is_state", &memory::is_state},
       {"root", &memory::root}, {"sources", &memory::sources}});
  live_storage.bind(
      names("LiveStorage"),
      {{"address", &place::address}, {"entries", &place::entries},
       {"memory", &place::memory}});
  live_tensor.bind(
      names("LiveTensor"),
      {{"address", &entry::address}, {"epoch", &entry::epoch}, {"key", &entry::key},
       {"memory", &entry::memory}, {"value", &entry::value}});
  live_tracker.bind(
      names("Tracker"),
      {{"_forget", &tracker::forget}, {"_freed", &tracker::freed},
       {"_places", &tracker::places}, {"clock", &tracker::clock},
       {"sources", &tracker::sources}, {"table", &tracker::table},
       {"writes", &tracker::writes}});
}

void bind_recording(const Names& names) {
  forward_record.bind(
      names("ForwardRecord"),
      {{"_decisions", &recording::decisions}, {"kept", &recording::kept},
       {"left_path", &recording::left_path}, {"_module_path", &recording::module_path},
       {"names", &recording::names}, {"number", &recording::number},
       {"numbers", &recording::numbers}, {"path", &recording::path}, {"place", &recording::place},
       {"policy", &recording::policy}, {"reads_arguments", &recording::reads_arguments},
       {"recent", &recording::recent}, {"routes", &recording::routes},
       {"_stages", &recording::stages}, {"stream", &recording::stream},
       {"streams", &recording::streams}, {"survey", &recording::survey},
       {"taken", &recording::taken}, {"tracker", &recording::tracker},
       {"trip", &recording::trip}, {"_unrepeatable", &recording::unrepeatable}});
  recorder_class.bind(
      names("Recorder"),
      {{"_late", &recorder::late}, {"fingerprinter", &recorder::fingerprinter},
       {"is_suspended", &recorder::is_suspended},
       {"opaque_depth", &recorder::opaque_depth}, {"recording", &recorder::recording}});
}

void bind_replay(const Names& names) {
  replayer_class.bind(
      names("Replayer"),
      {{"begins", &replayer::begins}, {"_enter", &replayer::enter},
       {"_entries", &replayer::entries}, {"_memoised", &replayer::memoised},
       {"_plan", &replayer::plan}, {"_plan_ran", &replayer::plan_ran},
       {"plans_run", &replayer::plans_run},
       {"_stage", &replayer::stage}, {"_task", &replayer::task},
       {"handles", &replayer::handles}, {"stages", &replayer::stages},
       {"stream", &replayer::stream}, {"trip", &replayer::trip}});
  handle_class.bind(
      names("ReplayHandle"),
      {{"fingerprint", &handle::fingerprint}, {"saved_version", &handle::saved_version},
       {"served", &handle::served}, {"stage", &handle::stage},
       {"value", &handle::value}});
  frame_class.bind(
      names("ReplayFrame"),
      {{"_arguments", &frame::arguments}, {"_checks", &frame::checks},
       {"_function", &frame::function}, {"_inputs", &frame::inputs}, {"_lock", &frame::lock},
       {"_named", &frame::named}, {"_outer", &frame::outer}, {"_recorder", &frame::recorder},
       {"_replayer", &frame::replayer}, {"_statistics", &frame::statistics}});
  checks_class.bind(
      names("Checks"),
      {{"_comparison", &checks::comparison}, {"_is_strict", &checks::is_strict},
       {"_originals", &checks::originals}, {"recorder", &checks::recorder},
       {"_statistics", &checks::statistics}, {"verified", &checks::verified},
       {"_verify", &checks::verify}});
  copy_of = names("copy_of");
  end_trip = names("end_trip");
  realign_in_python = names("realign");
  share = names("share");
  open_groups = names("OPEN_GROUPS");
  parameter_type = reinterpret_cast<PyTypeObject*>(names("Parameter"));
}

void bind_frame_parts(const Names& names) {
  native_replayer.bind(names("NativeReplayer"), {});
  verified_class.bind(
      names("Verified"),
      {{"calls", &verified::calls}, {"has_subclasses", &verified::has_subclasses},
       {"is_pending", &verified::is_pending}, {"is_sampled", &verified::is_sampled},
       {"paths", &verified::paths}, {"routes", &verified::routes}, {"sampling", &verified::sampling},
       {"unrepeatable", &verified::unrepeatable}});
  routes_class.bind(names("Routes"), {{"is_due", &routes::is_due}, {"known", &routes::known}});
  sampling_class.bind(
      names("Sampling"),
      {{"_calls", &sampling::calls}, {"_every", &sampling::every},
       {"is_due", &sampling::is_due}, {"_seen", &sampling::seen}});
  all_verified = names("VERIFIED");
  call_stages = names("CallStages");
  current_stream = names("current_stream");
  is_subclass = names("is_subclass");
  key_in_python = names("key_of");
  module_path_in = names("module_path_in");
  most_key_depth = PyLong_AsLong(names("MAX_DEPTH"));
  nothing_before = Ref::made(Py_BuildValue("(iO)", 0, Py_False)).release();
  observe_operators = names("observe_operators");
  observed_by_python = names("observed");
  observers_of_thread = names("OBSERVERS");
  observing_thread.bind(
      (PyObject*)Py_TYPE((PyObject*)attribute(observers_of_thread, thread_name)),
      {{"all", &observing::all}, {"depth", &observing::depth}, {"stack", &observing::stack}});
  operator_conditions = names("operator_conditions");
  routes_of = names("routes_of");
  set_out_in_python = names("set_out");
  shared_observers = PyUnicode_AsUTF8(names("SHARED"));
  switches = names("SWITCHES");
  verified_by_python = names("verified");
  weakly_in_python = names("weakly");
}

// The names of methods that C++ calls, interned, so that look-ups compare pointers.
const std::initializer_list<std::pair<const char*, PyObject**>> method_names = {
    {"_before", &before_name}, {"_leave_path", &leave_path_name}, {"_settle", &settle_name},
    {"abandon", &abandon_name}, {"end", &end_name}, {"thread", &thread_name},
    {"__enter__", &enter_name}, {"alignment", &alignment_name},
    {"count", &count_name}, {"device", &device_name},
    {"enter_for_operators", &enter_for_operators_name}, {"hooks", &hooks_name},
    {"key", &key_name}, {"names", &names_name}, {"numbers", &numbers_name},
    {"postponed", &postponed_name}, {"reads_arguments", &reads_arguments_name},
    {"requires_grad", &requires_grad_name}, {"sees_subclasses", &sees_subclasses_name},
    {"stages", &stages_name},
    {"_note_new", &note_new_name}, {"note_run", &note_run_name}, {"_run_begun", &run_begun_name}, {"begin", &begin_name},
    {"dtype", &dtype_name}, {"finish", &finish_name}, {"pack", &drop_name},
    {"note_forward_end", &note_forward_end_name}, {"training", &training_name},
    {"_give_up", &give_up_name}, {"_missing", &missing_name}, {"rrelu", &rrelu_name}, {"detach", &detach_name},
    {"__torch_function__", &torch_function_name}, {"empty", &empty_name},
    {"__dict__", &dict_name}, {"_buffers", &buffers_name}, {"_class", &class_name},
    {"_modules", &modules_name}, {"_note_buffers", &note_buffers_name},
    {"_forward_pre_hooks", &pre_hooks_name},
    {"_parameters", &parameters_name}, {"values", &values_name}, {"visit", &visit_name},
    {"enabled", &enabled_name}, {"strategy", &strategy_name},
    {"_is_fastpath_enabled", &fastpath_name}, {"_current_level", &current_level_name}, {"_note_reached", &note_reached_name},
    {"numpy.random", &numpy_random_name}, {"close", &close_name}, {"_check_end", &check_end_name}, {"_judge", &judge_name}, {"enter_ambient", &enter_ambient_name},
    {"enter_state", &enter_state_name}, {"_last", &last_name}, {"note", &note_name},
    {"places", &places_name}, {"rebuild", &rebuild_name},
    {"__exit__", &exit_name}, {"_check_external", &check_external_name}, {"_lent", &lent_name},
    {"_may_overwrite", &may_overwrite_name}, {"_pack", &pack_name}, {"put", &put_name}, {"survey", &survey_name},
    {"_run", &run_name}, {"_source", &source_name}, {"_unpack", &unpack_name},
    {"acquire", &acquire_name}, {"advance", &advance_name}, {"align", &align_name},
    {"asks", &asks_name}, {"before_write", &before_write_name},
    {"decided", &decided_name}, {"explained", &explained_name},
    {"held_in", &held_in_name}, {"hold", &hold_name}, {"is_current", &is_current_name},
    {"is_unpacked_once", &is_unpacked_once_name}, {"inputs", &inputs_name}, {"mark_read", &mark_read_name}, {"meet", &meet_name},
    {"note_empty", &note_empty_name}, {"note_outputs", &note_outputs_name},
    {"release", &release_name}, {"shape", &shape_name}};

void intern_names() {
  for (auto [text, name] : method_names) {
    *name = Ref::made(PyUnicode_InternFromString(text)).release();
  }
}

// bind(names): meet the classes and functions of Python, once.
PyObject* bind(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  Names names(object);
  zero = number(0).release();
  no_targets = PyTuple_New(0);
  empty_operator = names("EMPTY");
  view_operator = names("AS_STRIDED");
  find_operator = names("find_operator");
  operator_lock = names("OPERATOR_LOCK");
  first_task = PyLong_AsLong(names("FIRST_TASK"));
  scope_class = names("Scope");
  bind_tape(names);
  bind_tracking(names);
  bind_recording(names);
  bind_replay(names);
  bind_frame_parts(names);
  CallBox::ready("membudget.engine.native.Call", call_methods);
  StateBox::ready("membudget.engine.native.State");
  RouteBox::ready("membudget.engine.native.Route");
  StopBox::ready("membudget.engine.native.Stop");
  SurveyBox::ready("membudget.engine.native.Survey");
  TripBox::ready("membudget.engine.native.Trip");
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef functions[] = {
    {"bind", bind, METH_O, "Meet the Python classes that C++ makes instances of."},
    {"arrive", arrive, METH_O, "End a trip; false if its call ended on the way."},
    {"are_same", (PyCFunction)(void*)are_same_lists, METH_FASTCALL, "Compare identities."},
    {"are_same_names", (PyCFunction)(void*)are_same_names, METH_FASTCALL, "Compare dicts."},
    {"begun", (PyCFunction)(void*)begun, METH_FASTCALL, "Return a new `RerunFrame`."},
    {"bind_rerun", bind_rerun, METH_O, "Meet the classes of the rerun engine."},
    {"bound_now", bound_now, METH_O, "As `_bound_now`."},
    {"cover", cover_all, METH_O, "Cover the Python kernels of the named operators."},
    {"callbacks", callbacks, METH_O, "Return the callbacks of a tracker's references."},
    {"count_path", count_path, METH_O, "As `UseCounter._count_path`."},
    {"fill_hook", fill_hook, METH_O, "Return the hook that fills handles again."},
    {"has_names", has_names, METH_O, "Whether a module's names are as noted."},
    {"has_versions", has_versions, METH_O, "Whether tensors are as noted."},
    {"hooks", hooks, METH_O, "Return the saved-tensor hooks of a frame."},
    {"is_read_later", (PyCFunction)(void*)is_read_later, METH_FASTCALL, "As in Python."},
    {"leave", leave_route, METH_O, "Write the tape of a trip in its forward."},
    {"materialise", (PyCFunction)(void*)materialise_value, METH_FASTCALL,
     "As `Replayer._materialise`; false if Python must."},
    {"note_reads", (PyCFunction)(void*)note_reads, METH_FASTCALL, "As `Reads._note`."},
    {"path_to", (PyCFunction)(void*)path_to, METH_FASTCALL, "As `Replayer._path_to`."},
    {"release", release_trip, METH_O, "Free what a trip has recomputed."},
    {"replay_frame", (PyCFunction)(void*)new_replay_frame, METH_FASTCALL,
     "Return a new `ReplayFrame`."},
    {"route", (PyCFunction)(void*)route_of, METH_FASTCALL, "Return what was surveyed."},
    {"same", (PyCFunction)(void*)say_the_same, METH_FASTCALL, "Compare two routes."},
    {"run", (PyCFunction)(void*)run_frame, METH_FASTCALL, "As `RerunFrame.run`."},
    {"run_all", (PyCFunction)(void*)run_all, METH_FASTCALL, "Run operations again."},
    {"run_replay", (PyCFunction)(void*)run_replay, METH_FASTCALL,
     "As `ReplayFrame.run`."},
    {"settings", settings, METH_NOARGS, "As `_torch_settings.read`."},
    {"signature", (PyCFunction)(void*)signature, METH_FASTCALL, "As `signature_of`."},
    {"sums", sums, METH_O, "Return the fingerprint of integers on the CPU."},
    {"survey", new_survey, METH_NOARGS, "Begin the survey of a call."},
    {"trip", (PyCFunction)(void*)new_trip, METH_FASTCALL, "Begin a trip on a route."},
    {"walk", (PyCFunction)(void*)walk_module, METH_FASTCALL, "As `Reached._module`."},
    {"watch", watch, METH_O, "Record in this thread for an observer, or for `None`."},
    {"write_tape", write_tape, METH_O, "Write the tape of a trip in its backward."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_recorder", nullptr, -1, functions};

} // namespace
} // namespace membudget

PyMODINIT_FUNC PyInit__recorder() {
  membudget::intern_names();
  return PyModule_Create(&membudget::definition);
}
