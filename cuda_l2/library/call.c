/* Calls a kernel on torch tensors through CPython's C API: what ctypes and attribute reads do in 5 us, in a fraction.
 *
 * A tensor's address, shape and strides come from the C functions that torch.Tensor.__dlpack_c_exchange_api__ points to.
 * A call that is out of the ordinary in any way returns None: library/kernel.py then does it, or says what is wrong. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>

#include "deploy/tensor.h"

typedef struct {
    struct {
        uint32_t major, minor;
    } version;
    void *prev_api;
    void *allocate, *managed_from_object, *managed_to_object;
    int (*tensor_from_object)(void *object, DLTensor *out);
} ExchangeApi;

enum { DLPACK_MAJOR = 1, ALIGN = 64 };

typedef int (*run_fn)(void *product, const void *a, const void *b, void *c);

struct operand {
    int64_t rows, columns, row_stride, column_stride, bytes;
};

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    run_fn run;
    void *product;
    int code, bits;
    struct operand a, b, c;
    PyObject *like_c;
} Call;

/* From torch, once a process. */
static const ExchangeApi *api;
static PyTypeObject *tensor_type, *parameter_type, *device_context;
static PyObject *empty_like, *increment_version, *function_mode, *forward_ad, *level_name, *offset_name;
static PyGetSetDef *requires_grad;
static PyCFunction is_neg;
static void *const *(*tracing_state)(void);
static int64_t (*dispatch_modes)(void), (*function_modes)(void);
static uint8_t (*records_gradients)(void), (*key_included)(uint16_t key);
static uint16_t pre_dispatch, transforms;

static int plain(PyObject *object) { return Py_TYPE(object) == tensor_type || Py_TYPE(object) == parameter_type; }

/* Whether a tensor's address is one of memory. Of a tensor whose storage has none (zeros that torch only knows to be
 * zeros, the wrapper of torch.func.functionalize) torch gives the offset from null, which only a low address can be. */
static int in_memory(PyObject *tensor, const DLTensor *found) {
    uint64_t start = (uint64_t)(uintptr_t)found->data + found->byte_offset;
    if (start > UINT32_MAX) return 1;
    PyObject *offset = PyObject_CallMethodNoArgs(tensor, offset_name);
    long long elements = offset ? PyLong_AsLongLong(offset) : -1;
    Py_XDECREF(offset);
    if (PyErr_Occurred()) PyErr_Clear();
    return elements >= 0 && start && start != (uint64_t)elements * found->dtype.bits * found->dtype.lanes / 8;
}

/* Whether torch says what and where a tensor is: not of what is no tensor, and of none without memory of its own. */
static int described(PyObject *object, DLTensor *found) {
    if (!plain(object)) return 0;
    int failed = api->tensor_from_object(object, found);
    if (failed) PyErr_Clear();
    return !failed && in_memory(object, found);
}

/* The tensor's address; NULL where it is not exactly what the kernel takes. */
static char *address(const Call *call, const struct operand *wanted, PyObject *object) {
    DLTensor found;
    if (!described(object, &found)) return NULL;
    char *data = (char *)found.data + found.byte_offset;
    int fits = found.device.type == DLPACK_CPU && found.ndim == 2 && found.dtype.code == call->code &&
               found.dtype.bits == call->bits && found.dtype.lanes == 1 && found.shape[0] == wanted->rows &&
               found.shape[1] == wanted->columns && found.strides[0] == wanted->row_stride &&
               found.strides[1] == wanted->column_stride && (uintptr_t)data % ALIGN == 0;
    return fits ? data : NULL;
}

static int overlap(const char *x, int64_t x_bytes, const char *y, int64_t y_bytes) {
    return x < y + y_bytes && y < x + x_bytes;
}

enum { FORWARD = 1, RECORDED = 2 };

/* Whether gradients of any of the tensors may be wanted: FORWARD, RECORDED, 0, or -1 with an exception. */
static int differentiates(PyObject *const *tensors, int count) {
    PyObject *level = PyDict_GetItemWithError(forward_ad, level_name);
    if (!level || PyLong_AsLong(level) >= 0) return PyErr_Occurred() ? -1 : FORWARD;
    int any = 0;
    for (int i = 0; i < count && !any && records_gradients(); ++i) {
        PyObject *value = requires_grad->get(tensors[i], requires_grad->closure);
        if (!value) return -1;
        any = value != Py_False;
        Py_DECREF(value);
    }
    return any ? RECORDED : 0;
}

/* Whether a graph is traced or a mode sees what torch does, or a tensor stands for its negative: 1, 0, or -1. */
static int unusual(PyObject *const *tensors, int count) {
    int any = *tracing_state() || dispatch_modes() || key_included(pre_dispatch);
    for (int i = 0; i < count && !any; ++i) {
        PyObject *value = is_neg(tensors[i], NULL);
        if (!value) return -1;
        any = value != Py_False;
        Py_DECREF(value);
    }
    return any;
}

/* Whether a TorchFunctionMode is active, which sees calls of torch.ops: 1, 0, or -1 with an exception. Not that of
 * torch.set_default_device, which touches new tensors alone. */
static int seen(void) {
    for (int64_t i = 0, count = function_modes(); i < count; ++i) {
        PyObject *place = PyLong_FromLongLong(i), *mode = place ? PyObject_CallOneArg(function_mode, place) : NULL;
        int other = mode && Py_TYPE(mode) != device_context;
        Py_XDECREF(place);
        Py_XDECREF(mode);
        if (!mode || other) return mode ? 1 : -1;
    }
    return 0;
}

/* Counts a write: who saved the tensor for a backward pass learns that it has changed. 0 with an exception. */
static int written(PyObject *tensor) {
    PyObject *tensors = PyTuple_Pack(1, tensor), *done = tensors ? PyObject_CallOneArg(increment_version, tensors) : NULL;
    Py_XDECREF(tensors);
    Py_XDECREF(done);
    return done != NULL;
}

/* call(a, b, c): c, which is made where it is None; None where the call is out of the ordinary. */
static PyObject *call_tensors(PyObject *self, PyObject *const *tensors, size_t flags, PyObject *names) {
    Call *call = (Call *)self;
    if (PyVectorcall_NARGS(flags) != 3 || names) Py_RETURN_NONE;
    char *a = address(call, &call->a, tensors[0]), *b = a ? address(call, &call->b, tensors[1]) : NULL;
    int given = tensors[2] != Py_None;
    if (!b || (given && !plain(tensors[2]))) Py_RETURN_NONE;
    int count = given ? 3 : 2, careful = differentiates(tensors, count);
    if (!careful) careful = unusual(tensors, count);
    if (careful) return careful < 0 ? NULL : Py_NewRef(Py_None);
    PyObject *object = given ? Py_NewRef(tensors[2]) : PyObject_CallOneArg(empty_like, call->like_c);
    if (!object) return NULL;
    char *c = address(call, &call->c, object);
    if (!c || overlap(c, call->c.bytes, a, call->a.bytes) || overlap(c, call->c.bytes, b, call->b.bytes)) {
        Py_DECREF(object);
        Py_RETURN_NONE;
    }
    if (given && !written(object)) {
        Py_DECREF(object);
        return NULL;
    }
    int error;
    Py_BEGIN_ALLOW_THREADS;
    error = call->run(call->product, a, b, c);
    Py_END_ALLOW_THREADS;
    if (error) {
        Py_DECREF(object);
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return object;
}

static void call_dealloc(PyObject *self) {
    Py_XDECREF(((Call *)self)->like_c);
    Py_TYPE(self)->tp_free(self);
}

/* Call(run, product, like c, code, bits, a, b, c): addresses as integers, an operand as (rows, columns, row stride,
 * column stride, bytes). */
static PyObject *call_new(PyTypeObject *type, PyObject *args, PyObject *names) {
    unsigned long long run, product;
    PyObject *like_c;
    int code, bits;
    struct operand a, b, c;
    if (!PyArg_ParseTuple(args, "KKOii(LLLLL)(LLLLL)(LLLLL)", &run, &product, &like_c, &code, &bits, &a.rows,
                          &a.columns, &a.row_stride, &a.column_stride, &a.bytes, &b.rows, &b.columns, &b.row_stride,
                          &b.column_stride, &b.bytes, &c.rows, &c.columns, &c.row_stride, &c.column_stride, &c.bytes))
        return NULL;
    Call *call = (Call *)type->tp_alloc(type, 0);
    if (!call) return NULL;
    call->vectorcall = call_tensors;
    call->run = (run_fn)(uintptr_t)run;
    call->product = (void *)(uintptr_t)product;
    call->like_c = Py_NewRef(like_c);
    call->code = code, call->bits = bits;
    call->a = a, call->b = b, call->c = c;
    return (PyObject *)call;
}

static PyTypeObject call_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "cuda_l2_call.Call",
    .tp_basicsize = sizeof(Call),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Call, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = call_new,
    .tp_dealloc = call_dealloc,
};

/* A product on a GPU, or linear where transposed: what torch.ops needs 1.4 us for beside the launch, which has to serve
 * where this returns None. serve, wrapped: of deploy/op.cpp. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    int (*serve)(const DLTensor *a, const DLTensor *b, int transposed, const DLTensor *out, void **made);
    int (*serves)(const DLTensor *a, const DLTensor *b, int transposed);
    PyObject *(*wrapped)(void *handle, void *wrap);
    void *wrap;
    PyObject *recorded; /* recorded(a, b, transposed): the product, with its gradients */
    uint8_t (*autocasts)(int8_t device);
    int transposed;
} Served;

/* call(a, b[, out]) */
static PyObject *serve_tensors(PyObject *self, PyObject *const *tensors, size_t flags, PyObject *names) {
    Served *served = (Served *)self;
    int count = (int)PyVectorcall_NARGS(flags), right = (count == 2 || count == 3) && !names;
    DLTensor found[3];
    for (int i = 0; right && i < count; ++i) right = plain(tensors[i]);
    if (!right) Py_RETURN_NONE;
    int careful = seen();
    if (careful) return careful < 0 ? NULL : Py_NewRef(Py_None);
    careful = differentiates(tensors, count);
    int records = careful == RECORDED && count == 2 && !key_included(transforms);
    if (!careful || records) careful = unusual(tensors, count);
    if (careful) return careful < 0 ? NULL : Py_NewRef(Py_None);
    for (int i = 0; right && i < count; ++i) right = described(tensors[i], &found[i]);
    if (!right) Py_RETURN_NONE;
    if (served->autocasts(found[0].device.type == DLPACK_CUDA)) Py_RETURN_NONE; /* torch's number of the device's type */
    void *made = NULL;
    int done;
    Py_BEGIN_ALLOW_THREADS;
    if (records)
        done = served->serves(&found[0], &found[1], served->transposed);
    else
        done = served->serve(&found[0], &found[1], served->transposed, count == 3 ? &found[2] : NULL, &made);
    Py_END_ALLOW_THREADS;
    if (!done) Py_RETURN_NONE;
    if (records) {
        PyObject *terms[] = {tensors[0], tensors[1], served->transposed ? Py_True : Py_False};
        return PyObject_Vectorcall(served->recorded, terms, 3, NULL);
    }
    if (count == 3) return written(tensors[2]) ? Py_NewRef(tensors[2]) : NULL;
    PyObject *object = served->wrapped(made, served->wrap);
    if (!object && !PyErr_Occurred()) PyErr_NoMemory();
    return object;
}

static void served_dealloc(PyObject *self) {
    Py_XDECREF(((Served *)self)->recorded);
    Py_TYPE(self)->tp_free(self);
}

/* Served(serve, serves, wrapped, wrap, autocasts, recorded, transposed): addresses as integers. */
static PyObject *served_new(PyTypeObject *type, PyObject *args, PyObject *names) {
    unsigned long long serve, serves, wrapped, wrap, autocasts;
    PyObject *recorded;
    int transposed;
    if (!PyArg_ParseTuple(args, "KKKKKOp", &serve, &serves, &wrapped, &wrap, &autocasts, &recorded, &transposed)) return NULL;
    Served *served = (Served *)type->tp_alloc(type, 0);
    if (!served) return NULL;
    served->vectorcall = serve_tensors;
    served->serve = (int (*)(const DLTensor *, const DLTensor *, int, const DLTensor *, void **))(uintptr_t)serve;
    served->serves = (int (*)(const DLTensor *, const DLTensor *, int))(uintptr_t)serves;
    served->recorded = Py_NewRef(recorded);
    served->wrapped = (PyObject *(*)(void *, void *))(uintptr_t)wrapped;
    served->wrap = (void *)(uintptr_t)wrap;
    served->autocasts = (uint8_t(*)(int8_t))(uintptr_t)autocasts;
    served->transposed = transposed;
    return (PyObject *)served;
}

static PyTypeObject served_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "cuda_l2_call.Served",
    .tp_basicsize = sizeof(Served),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Served, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = served_new,
    .tp_dealloc = served_dealloc,
};

/* setup(Tensor, Parameter, DeviceContext, exchange capsule, empty_like, increment_version, what gives a function mode by
 * its place, names of forward_ad, descriptors of requires_grad and is_neg, addresses of getTracingState, stack_len of
 * dispatch and of function modes, GradMode::is_enabled and tls_is_dispatch_key_included, numbers of the keys PreDispatch
 * and FuncTorchDynamicLayerFrontMode) */
static PyObject *setup(PyObject *module, PyObject *args) {
    PyObject *tensor, *parameter, *context, *capsule;
    PyGetSetDescrObject *grad;
    PyMethodDescrObject *neg;
    unsigned long long tracing, modes, functions, gradients, included;
    if (!PyArg_ParseTuple(args, "O!O!O!OOOOO!O!O!KKKKKHH", &PyType_Type, &tensor, &PyType_Type, &parameter,
                          &PyType_Type, &context, &capsule, &empty_like, &increment_version, &function_mode,
                          &PyDict_Type, &forward_ad, &PyGetSetDescr_Type, &grad, &PyMethodDescr_Type, &neg, &tracing,
                          &modes, &functions, &gradients, &included, &pre_dispatch, &transforms))
        return NULL;
    api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!api) return NULL;
    if (api->version.major != DLPACK_MAJOR || !api->tensor_from_object)
        return PyErr_Format(PyExc_RuntimeError, "torch speaks DLPack %u", api->version.major);
    level_name = PyUnicode_InternFromString("_current_level");
    offset_name = PyUnicode_InternFromString("storage_offset");
    if (!level_name || !offset_name) return NULL;
    requires_grad = grad->d_getset;
    is_neg = neg->d_method->ml_meth; /* of a method without arguments */
    tracing_state = (void *const *(*)(void))(uintptr_t)tracing;
    dispatch_modes = (int64_t (*)(void))(uintptr_t)modes;
    function_modes = (int64_t (*)(void))(uintptr_t)functions;
    records_gradients = (uint8_t(*)(void))(uintptr_t)gradients;
    key_included = (uint8_t(*)(uint16_t))(uintptr_t)included;
    Py_INCREF(args); /* all of it stays */
    tensor_type = (PyTypeObject *)tensor, parameter_type = (PyTypeObject *)parameter;
    device_context = (PyTypeObject *)context;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"setup", setup, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "cuda_l2_call", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit_cuda_l2_call(void) {
    if (PyType_Ready(&call_type) < 0 || PyType_Ready(&served_type) < 0) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module && (PyModule_AddObjectRef(module, "Call", (PyObject *)&call_type) < 0 ||
                   PyModule_AddObjectRef(module, "Served", (PyObject *)&served_type) < 0))
        Py_CLEAR(module);
    return module;
}
