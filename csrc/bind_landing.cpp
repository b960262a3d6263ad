// Takes the gradients of leaves in place of `.grad`, without Python in between.
#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <utility>
#include <vector>

#include "bind.hpp"

namespace py = pybind11;

namespace pykern {

namespace {

// Collects the gradient of one leaf; made before each backward of a stage that is not the first. A
// type of Python's own and not of pybind11's, whose calls take longer than all that this does.
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
    PyObject* layout = PyUnicode_InternFromString("layout");
};

const Names& names() {
    static const Names all;
    return all;
}

Landing* self_of(PyObject* object) { return reinterpret_cast<Landing*>(object); }

// The leaf's hooks are left as they are where anything is raised here.
PyObject* made_for(PyTypeObject* type, PyObject* leaf) {
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

// The gradient, None if none has come; the leaf is as before.
PyObject* take(PyObject* object) {
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

// Parts of torch and of the package that `collect` uses. They live as long as the process.
struct Collecting {
    PyTypeObject* landing = nullptr;
    py::object tensor;      // the type
    py::object strided;     // the layout
    py::object storage_of;  // gives the address of a tensor's storage
    py::object holders_at;  // gives the number of holders of a storage
    py::object settled;     // gives a gradient in memory that nothing else writes
};

Collecting& collecting() {
    static Collecting& all = *new Collecting;
    return all;
}

// Whether a gradient is alone in its memory, as most are; -1 where Python raised.
int is_alone(PyObject* gradient) {
    const Collecting& use = collecting();
    if (reinterpret_cast<PyObject*>(Py_TYPE(gradient)) != use.tensor.ptr()) return 0;
    const auto layout =
        py::reinterpret_steal<py::object>(PyObject_GetAttr(gradient, names().layout));
    if (!layout) return -1;
    if (!layout.is(use.strided)) return 0;
    const auto storage =
        py::reinterpret_steal<py::object>(PyObject_CallOneArg(use.storage_of.ptr(), gradient));
    if (!storage) return -1;
    const auto holders =
        py::reinterpret_steal<py::object>(PyObject_CallOneArg(use.holders_at.ptr(), storage.ptr()));
    if (!holders) return -1;
    const long number = PyLong_AsLong(holders.ptr());
    return number == -1 && PyErr_Occurred() != nullptr ? -1 : static_cast<int>(number == 1);
}

// The gradient of a landing, in memory that nothing else writes.
py::object settled_of(PyObject* landing) {
    auto gradient = py::reinterpret_steal<py::object>(take(landing));
    if (!gradient || gradient.is_none()) return gradient;
    const int alone = is_alone(gradient.ptr());
    if (alone < 0) return {};
    if (alone > 0) return gradient;
    return py::reinterpret_steal<py::object>(
        PyObject_CallOneArg(collecting().settled.ptr(), gradient.ptr()));
}

// The gradients of landings, which restore their leaves whatever is raised.
PyObject* settled_of(const std::vector<py::object>& landings) {
    auto found =
        py::reinterpret_steal<py::object>(PyTuple_New(static_cast<Py_ssize_t>(landings.size())));
    for (std::size_t i = 0; i < landings.size(); ++i) {
        if (PyErr_Occurred() != nullptr) {
            const py::error_scope kept;
            const auto ignored = py::reinterpret_steal<py::object>(take(landings[i].ptr()));
            PyErr_Clear();
            continue;
        }
        py::object gradient = settled_of(landings[i].ptr());
        if (gradient && found) {
            PyTuple_SET_ITEM(found.ptr(), static_cast<Py_ssize_t>(i), gradient.release().ptr());
        }
    }
    return PyErr_Occurred() != nullptr ? nullptr : found.release().ptr();
}

// collect(engine, options, outputs, gradients, leaves)
PyObject* collect(PyObject* /*unused*/, PyObject* const* given, Py_ssize_t count) {
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "collect takes 5 arguments");
        return nullptr;
    }
    for (int i = 1; i < 5; ++i) {
        if (PyTuple_Check(given[i]) || PyList_Check(given[i])) continue;
        PyErr_SetString(PyExc_TypeError, "collect takes a function and four tuples or lists");
        return nullptr;
    }
    PyObject* const options = given[1];
    PyObject* const outputs = given[2];
    PyObject* const gradients = given[3];
    PyObject* const leaves = given[4];
    if (PySequence_Fast_GET_SIZE(outputs) == 0) Py_RETURN_NONE;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(gradients); ++i) {
        if (PySequence_Fast_GET_ITEM(gradients, i) == Py_None) Py_RETURN_NONE;
    }
    std::vector<py::object> landings;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(leaves); ++i) {
        PyObject* landing = made_for(collecting().landing, PySequence_Fast_GET_ITEM(leaves, i));
        if (landing == nullptr) return settled_of(landings);
        landings.push_back(py::reinterpret_steal<py::object>(landing));
    }
    std::vector<PyObject*> arguments{outputs, gradients};
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(options); ++i) {
        arguments.push_back(PySequence_Fast_GET_ITEM(options, i));
    }
    const auto ended = py::reinterpret_steal<py::object>(
        PyObject_Vectorcall(given[0], arguments.data(), arguments.size(), nullptr));
    return settled_of(landings);
}

}  // namespace

void bind_landing(py::module_& module) {
    static std::array<PyType_Slot, 5> slots{
        PyType_Slot{Py_tp_call, reinterpret_cast<void*>(call)},
        PyType_Slot{Py_tp_traverse, reinterpret_cast<void*>(traverse)},
        PyType_Slot{Py_tp_clear, reinterpret_cast<void*>(clear)},
        PyType_Slot{Py_tp_dealloc, reinterpret_cast<void*>(free)}, PyType_Slot{0, nullptr}};
    static PyType_Spec spec{
        "pykern._C.Landing", sizeof(Landing), 0,
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots.data()};
    PyObject* const type = PyType_FromSpec(&spec);
    if (type == nullptr) throw py::error_already_set();
    collecting().landing = reinterpret_cast<PyTypeObject*>(type);
    module.def(
        "prepare_collect",
        [](py::object tensor, py::object strided, py::object storage_of, py::object holders_at,
           py::object settled) {
            Collecting& use = collecting();
            use.tensor = std::move(tensor);
            use.strided = std::move(strided);
            use.storage_of = std::move(storage_of);
            use.holders_at = std::move(holders_at);
            use.settled = std::move(settled);
        },
        py::arg("tensor"), py::arg("strided"), py::arg("storage_of"), py::arg("holders_at"),
        py::arg("settled"), "Sets the parts of torch, and of the package, that `collect` uses.");
    static std::array<PyMethodDef, 2> functions{
        PyMethodDef{"collect", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(collect)),
                    METH_FASTCALL,
                    "Runs a backward and gives the gradients of leaves; None, and nothing is run, "
                    "where an output has no gradient."},
        PyMethodDef{nullptr, nullptr, 0, nullptr}};
    if (PyModule_AddFunctions(module.ptr(), functions.data()) != 0) throw py::error_already_set();
}

}  // namespace pykern
