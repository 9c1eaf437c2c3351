// A Python object around a C++ one.

#pragma once

#include <new>

#include "python.h"

namespace membudget {

template <typename Content>
struct Box {
  PyObject_HEAD
  Content content;

  static inline PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};

  template <typename... Arguments>
  static Ref make(Arguments&&... arguments) {
    auto* made = PyObject_New(Box, &type);
    new (&made->content) Content{std::forward<Arguments>(arguments)...};
    return Ref::made(reinterpret_cast<PyObject*>(made));
  }

  static bool holds(PyObject* object) { return Py_TYPE(object) == &type; }

  static Content& of(PyObject* object) { return reinterpret_cast<Box*>(object)->content; }

  static void free(PyObject* object) {
    of(object).~Content();
    PyObject_Free(object);
  }

  static void ready(const char* name, PyMethodDef* methods = nullptr) {
    type.tp_name = name;
    type.tp_basicsize = sizeof(Box);
    type.tp_flags = Py_TPFLAGS_DEFAULT;
    type.tp_dealloc = free;
    type.tp_methods = methods;
    check(PyType_Ready(&type));
  }
};

} // namespace membudget
