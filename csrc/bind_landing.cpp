// Landing: takes the gradient of a leaf in place of `.grad`, without Python in between.
#include <pybind11/pybind11.h>

#include <array>
#include <utility>

#include "bind.hpp"

namespace py = pybind11;

namespace pykern {

namespace {

// A type of Python's own and not of pybind11's, whose calls take longer than all that this does.
// It is called within every backward of a stage that is not the first.
struct Landing {
    PyObject ob_base;
    PyObject* leaf;
    PyObject* gradient;  // null before it arrives
};

// Names and numbers, looked up once. They live as long as the process.
struct Names {
    PyObject* hooks = PyUnicode_InternFromString("_backward_hooks");
    PyObject* requires_grad = PyUnicode_InternFromString("requires_grad");
    // The key among the hooks of a leaf; hooks that layers register have numbers from 0 on.
    PyObject* key = PyLong_FromLong(-1);
};

const Names& names() {
    static const Names all;
    return all;
}

Landing* self_of(PyObject* object) { return reinterpret_cast<Landing*>(object); }

// The leaf's hooks are left as they are where anything is raised here.
PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* named) {
    PyObject* leaf = nullptr;
    std::array<const char*, 2> keywords{"leaf", nullptr};
    if (PyArg_ParseTupleAndKeywords(arguments, named, "O", const_cast<char**>(keywords.data()),
                                    &leaf) == 0) {
        return nullptr;
    }
    const auto made = py::reinterpret_steal<py::object>(type->tp_alloc(type, 0));
    if (!made) return nullptr;
    self_of(made.ptr())->leaf = Py_NewRef(leaf);
    const auto hooks = py::reinterpret_steal<py::object>(PyObject_GetAttr(leaf, names().hooks));
    if (!hooks) return nullptr;
    if (!hooks.is_none()) {
        // After the hooks of layers, which may change the gradient.
        if (PyObject_SetItem(hooks.ptr(), names().key, made.ptr()) != 0) return nullptr;
        return py::object(made).release().ptr();
    }
    const auto own = py::reinterpret_steal<py::object>(PyDict_New());
    if (!own || PyDict_SetItem(own.ptr(), names().key, made.ptr()) != 0) return nullptr;
    if (PyObject_SetAttr(leaf, names().hooks, own.ptr()) != 0) return nullptr;
    return py::object(made).release().ptr();
}

// Called by autograd when the gradient is complete.
PyObject* call(PyObject* object, PyObject* arguments, PyObject* named) {
    PyObject* gradient = nullptr;
    if (named != nullptr && PyDict_Size(named) > 0) {
        PyErr_SetString(PyExc_TypeError, "a landing is called with a gradient, not by name");
        return nullptr;
    }
    if (PyArg_UnpackTuple(arguments, "Landing", 1, 1, &gradient) == 0) return nullptr;
    // AccumulateGrad runs next, and ignores a tensor that does not require grad.
    PyObject* leaf = self_of(object)->leaf;
    if (PyObject_SetAttr(leaf, names().requires_grad, Py_False) != 0) return nullptr;
    Py_XSETREF(self_of(object)->gradient, Py_NewRef(gradient));
    Py_RETURN_NONE;
}

PyObject* take(PyObject* object, PyObject* /*unused*/) {
    Landing* self = self_of(object);
    if (PyObject_SetAttr(self->leaf, names().requires_grad, Py_True) != 0) return nullptr;
    const auto hooks =
        py::reinterpret_steal<py::object>(PyObject_GetAttr(self->leaf, names().hooks));
    if (!hooks) return nullptr;
    const Py_ssize_t number = PyObject_Size(hooks.ptr());
    if (number < 0) return nullptr;
    const int failed = number == 1 ? PyObject_SetAttr(self->leaf, names().hooks, Py_None)
                                   : PyObject_DelItem(hooks.ptr(), names().key);
    if (failed != 0) return nullptr;
    PyObject* gradient = std::exchange(self->gradient, nullptr);
    return gradient != nullptr ? gradient : Py_NewRef(Py_None);
}

int traverse(PyObject* object, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self_of(object)->leaf);
    Py_VISIT(self_of(object)->gradient);
    return 0;
}

int clear(PyObject* object) {
    Py_CLEAR(self_of(object)->leaf);
    Py_CLEAR(self_of(object)->gradient);
    return 0;
}

void free(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    clear(object);
    type->tp_free(object);
    Py_DECREF(type);
}

}  // namespace

void bind_landing(py::module_& module) {
    static std::array<PyMethodDef, 2> methods{
        PyMethodDef{"take", take, METH_NOARGS,
                    "The gradient, None if none has come; the leaf is as before."},
        PyMethodDef{nullptr, nullptr, 0, nullptr}};
    static std::array<PyType_Slot, 8> slots{
        PyType_Slot{Py_tp_doc,
                    const_cast<char*>("Collects the gradient of one leaf in place of `.grad`; made "
                                      "before each backward.")},
        PyType_Slot{Py_tp_new, reinterpret_cast<void*>(make)},
        PyType_Slot{Py_tp_call, reinterpret_cast<void*>(call)},
        PyType_Slot{Py_tp_methods, methods.data()},
        PyType_Slot{Py_tp_traverse, reinterpret_cast<void*>(traverse)},
        PyType_Slot{Py_tp_clear, reinterpret_cast<void*>(clear)},
        PyType_Slot{Py_tp_dealloc, reinterpret_cast<void*>(free)},
        PyType_Slot{0, nullptr}};
    static PyType_Spec spec{"pykern._C.Landing", sizeof(Landing), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots.data()};
    const auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
    if (!type) throw py::error_already_set();
    module.attr("Landing") = type;
}

}  // namespace pykern
