// The classes and functions of the rerun engine that C++ meets.

#pragma once

#include "forward.h"

namespace membudget {

inline void bind_hooks(const Names& names) {
  rerun_handle.bind(
      names("RerunHandle"),
      {{"address", &saved::address}, {"tensor", &saved::tensor},
       {"version", &saved::version}});
  rerun_class.bind(
      names("Rerun"),
      {{"_cursor", &rerun::cursor}, {"_externals", &rerun::externals},
       {"_failure", &rerun::failure}, {"_fingerprints", &rerun::fingerprints},
       {"_handles", &rerun::handles}, {"_is_guarded", &rerun::is_guarded},
       {"_last_needed", &rerun::last_needed}, {"_may_stop", &rerun::may_stop},
       {"_metadata", &rerun::metadata}, {"_recording", &rerun::recording},
       {"_site", &rerun::site}, {"_stopped", &rerun::stopped},
       {"_trace", &rerun::trace}});
  fills_what_it_saved = names("fills_what_it_saved");
  stop_recompute = names("StopRecompute");
  open_groups = names("OPEN_GROUPS");
  parameter_type = reinterpret_cast<PyTypeObject*>(names("Parameter"));
}

// What a region notes, and what it restores.
inline void bind_surroundings(const Names& names) {
  surroundings_class.bind(
      names("Surroundings"),
      {{"_ambient", &around::ambient}, {"_autocast", &around::autocast},
       {"_function", &around::function}, {"_is_checked", &around::is_checked},
       {"_noted", &around::noted}, {"_private", &around::private_},
       {"_sources", &around::sources}, {"_stream", &around::stream},
       {"arguments", &around::arguments}, {"is_lazy", &around::is_lazy},
       {"needs_repair", &around::needs_repair}, {"random_log", &around::random_log},
       {"reads", &around::reads}, {"runs_torchscript", &around::runs_torchscript},
       {"trainable", &around::trainable}});
  ambient_class.bind(
      names("Ambient"),
      {{"context", &ambient::context}, {"dispatch_modes", &ambient::dispatch_modes},
       {"function_modes", &ambient::function_modes},
       {"settings", &ambient::settings}});
  held_arguments.bind(
      names("HeldArguments"),
      {{"_alone", &given::alone}, {"_args", &given::args}, {"_kwargs", &given::kwargs},
       {"is_nested", &given::is_nested}, {"others", &given::others},
       {"tensors", &given::tensors}});
  held_tensor.bind(
      names("HeldTensor"),
      {{"alias", &one_held::alias}, {"changed_by_region", &one_held::changed_by_region},
       {"place", &one_held::place}, {"version", &one_held::version}});
  source_class.bind(names("Source"), {{"mark", &source::mark}});
}

inline void bind_frames(const Names& names) {
  region_frame.bind(
      names("RerunFrame"),
      {{"calls", &region::calls}, {"contexts", &region::contexts},
       {"fingerprints", &region::fingerprints}, {"finished", &region::finished},
       {"function", &region::function}, {"handles", &region::handles},
       {"holds", &region::holds}, {"is_new", &region::is_new}, {"lock", &region::lock},
       {"metadata", &region::metadata}, {"nested_backward", &region::nested_backward},
       {"options", &region::options}, {"statistics", &region::statistics},
       {"surroundings", &region::surroundings}, {"trace", &region::trace}});
  region_options.bind(
      names("RegionOptions"),
      {{"decisions", &options::decisions}, {"early_stop", &options::early_stop},
       {"guards", &options::guards}, {"is_instrumented", &options::is_instrumented},
       {"may_follow", &options::may_follow}, {"offload", &options::offload}, {"policy", &options::policy},
       {"preserve_rng_state", &options::preserve_rng_state}, {"strict", &options::strict},
       {"use_reentrant", &options::use_reentrant}, {"verify", &options::verify}});
  region_calls.bind(
      names("Calls"),
      {{"_count", &calls::count}, {"fills_late", &calls::fills_late},
       {"_is_settled", &calls::is_settled},
       {"owner", &calls::owner}, {"paths", &calls::paths},
       {"sampling", &calls::sampling}});
  region_statistics.bind(
      names("Statistics"),
      {{"label", &statistics::label}, {"recomputes", &statistics::recomputes}});
  calls_owner.bind(
      names("Owner"),
      {{"adds_gradients", &owner::adds_gradients},
       {"differentiates", &owner::differentiates}});
}

inline void bind_reach(const Names& names) {
  reached_class.bind(
      names("Reached"),
      {{"_seen", &reached::seen}, {"attributes", &reached::attributes},
       {"buffers", &reached::buffers}, {"containers", &reached::containers},
       {"functions", &reached::functions}, {"generators", &reached::generators},
       {"modules", &reached::modules},
       {"names", &reached::names}, {"objects", &reached::objects},
       {"slots", &reached::slots}, {"stateful_modules", &reached::stateful_modules},
       {"tensors", &reached::tensors}});
  reads_class.bind(
      names("Reads"),
      {{"_addresses", &reads::addresses}, {"_modules", &reads::modules},
       {"_namespaces", &reads::namespaces}, {"_parameters", &reads::parameters},
       {"_tensors", &reads::tensors}, {"_training", &reads::training},
       {"_versions", &reads::versions}});
  address_of_python = names("address_of");
  version_of_python = names("version_of");
  attribute_names = names("attribute_names");
  class_slots = names("class_slots");
  known_attributes = names("ATTRIBUTES");
  module_visitor = names("module_visitor");
  most_depth = PyLong_AsLong(names("MAX_DEPTH"));
  no_text = PyUnicode_New(0, 0);
  visitors = names("VISITORS");
}

// bind_rerun(names): meet the classes of the rerun engine, once.
inline PyObject* bind_rerun(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  Names names(object);
  bind_hooks(names);
  bind_surroundings(names);
  bind_frames(names);
  bind_reach(names);
  as_it_is = names("as_it_is");
  autocast_class = names("Autocast");
  autocast_state = names("autocast_state");
  module_type = names("Module");
  by_backward = names("BY_BACKWARD");
  recomputing = names("RECOMPUTING");
  release_in_time = names("release_in_time");
  isolation_enter = names("enter");
  isolation_leave = names("leave");
  isolation_registry = names("REGISTRY");
  registry_class.bind(
      (PyObject*)Py_TYPE(isolation_registry),
      {{"owner", &registry::owner}, {"running", &registry::running},
       {"shared", &registry::shared}});
  bring_all_back = names("bring_all_back");
  code_slots = names("CODE_SLOTS");
  first_place = names("FIRST");
  forward_ad = names("forward_ad");
  global_sources = names("global_sources");
  inert_types = names("INERT");
  is_shared = names("is_shared");
  lock_class = names("Lock");
  nothing_reached = names("NOTHING");
  reach = names("reach");
  einsum_settings = names("EINSUM");
  mha_settings = names("MHA");
  has_cuda_settings = names("has_cuda_settings") == Py_True;
  read_settings = names("read_settings");
  scope_class = names("Scope");
  sys_modules = names("modules");
  torch_sources = names("torch_sources");
  no_targets = Ref::made(PyTuple_New(0)).release();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

} // namespace membudget
