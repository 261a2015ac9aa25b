/* HIP's runtime interface: graphs, launches, synchronisation and lookups by name. */
#define DRIVER aim_hip
#include "wrappers.h"

WRAP(hipGraphAddMemAllocNode,
     (void **node, void *graph, const void *dependencies, size_t count, struct node_parameters *parameters),
     (node, graph, dependencies, count, parameters))
    if (parameters == NULL)
        return INSIDE(real(node, graph, dependencies, count, parameters));
    return MEMORY_NODE(graph, parameters, real(node, graph, dependencies, count, parameters));
END
WRAP(hipGraphAddNode, (void **node, void *graph, const void *dependencies, size_t count, struct any_node *parameters),
     (node, graph, dependencies, count, parameters))
    if (parameters == NULL || parameters->type != NODE_ALLOCATES)
        return INSIDE(real(node, graph, dependencies, count, parameters));
    return MEMORY_NODE(graph, &parameters->memory, real(node, graph, dependencies, count, parameters));
END
WRAP(hipGraphInstantiate, (void **exec, void *graph, void *node, char *log, size_t size), (exec, graph, node, log, size))
    return INSTANTIATED(graph, exec, real(exec, graph, node, log, size));
END
WRAP(hipGraphInstantiateWithFlags, (void **exec, void *graph, unsigned long long flags), (exec, graph, flags))
    return INSTANTIATED(graph, exec, real(exec, graph, flags));
END
WRAP(hipGraphInstantiateWithParams, (void **exec, void *graph, void *parameters), (exec, graph, parameters))
    return INSTANTIATED(graph, exec, real(exec, graph, parameters));
END
#define UNLOAD(symbol)                                                                                                 \
    WRAP(symbol, (void *code), (code))                                                                                 \
        aim_lengths_forget(); /* before the driver can give its handles to other code */                               \
        return INSIDE(real(code));                                                                                     \
    END
UNLOAD(hipModuleUnload)
UNLOAD(hipLibraryUnload)
WRAP(hipGraphDestroy, (void *graph), (graph))
    aim_graph_gone(&DRIVER, P(graph)); /* before the driver can give the handle to another thread */
    return INSIDE(real(graph));
END
WRAP(hipGraphExecDestroy, (void *exec), (exec))
    struct aim_key key = graph_key(exec);
    aim_exec_gone(&DRIVER, P(exec));
    aim_length_forget(&key);
    return INSIDE(real(exec));
END
WRAP(hipDeviceGraphMemTrim, (int on), (on))
    int code = INSIDE(real(on));
    aim_graph_settle(&DRIVER, on);
    return code;
END

struct dim3 {
    uint32_t x, y, z;
};
#define KERNEL(symbol, form)                                                                                           \
    WRAP(symbol,                                                                                                       \
         (const void *function, struct dim3 grid, struct dim3 block, void **arguments, size_t shared, void *stream),   \
         (function, grid, block, arguments, shared, stream))                                                           \
        return LAUNCH(form(stream), kernel_key(function, grid.x, grid.y, grid.z),                                            \
                      real(function, grid, block, arguments, shared, stream));                                         \
    END
KERNEL(hipLaunchKernel, )
KERNEL(hipLaunchKernel_spt, PER_THREAD)

#define COOPERATIVE(symbol, form)                                                                                      \
    WRAP(symbol,                                                                                                       \
         (const void *function, struct dim3 grid, struct dim3 block, void **arguments, unsigned shared, void *stream), \
         (function, grid, block, arguments, shared, stream))                                                           \
        return LAUNCH(form(stream), kernel_key(function, grid.x, grid.y, grid.z),                                            \
                      real(function, grid, block, arguments, shared, stream));                                         \
    END
COOPERATIVE(hipLaunchCooperativeKernel, )
COOPERATIVE(hipLaunchCooperativeKernel_spt, PER_THREAD)

WRAP(hipExtLaunchKernel,
     (const void *function, struct dim3 grid, struct dim3 block, void **arguments, size_t shared, void *stream,
      void *before, void *after, int flags),
     (function, grid, block, arguments, shared, stream, before, after, flags))
    return LAUNCH(stream, kernel_key(function, grid.x, grid.y, grid.z),
                  real(function, grid, block, arguments, shared, stream, before, after, flags));
END

struct launch { /* hipLaunchConfig_t and HIP_LAUNCH_CONFIG: both have the stream at byte 32 */
    unsigned sizes[8];
    void *stream;
};
WRAP(hipLaunchKernelExC, (const struct launch *launch, const void *function, void **arguments),
     (launch, function, arguments))
    if (launch == NULL)
        return real(launch, function, arguments);
    return LAUNCH(launch->stream, kernel_key(function, launch->sizes[0], launch->sizes[1], launch->sizes[2]),
                  real(launch, function, arguments));
END
WRAP(hipDrvLaunchKernelEx, (const struct launch *launch, void *function, void **parameters, void **extra),
     (launch, function, parameters, extra))
    if (launch == NULL)
        return real(launch, function, parameters, extra);
    return LAUNCH(launch->stream, kernel_key(function, launch->sizes[0], launch->sizes[1], launch->sizes[2]),
                  real(launch, function, parameters, extra));
END

WRAP(hipModuleLaunchKernel,
     (void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
      void *stream, void **parameters, void **extra),
     (function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra))
    return LAUNCH(stream, kernel_key(function, gx, gy, gz),
                  real(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra));
END
WRAP(hipModuleLaunchCooperativeKernel,
     (void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
      void *stream, void **parameters),
     (function, gx, gy, gz, bx, by, bz, shared, stream, parameters))
    return LAUNCH(stream, kernel_key(function, gx, gy, gz),
                  real(function, gx, gy, gz, bx, by, bz, shared, stream, parameters));
END
WRAP(hipExtModuleLaunchKernel,
     (void *function, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by, uint32_t bz, size_t shared,
      void *stream, void **parameters, void **extra, void *before, void *after, uint32_t flags),
     (function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra, before, after, flags))
    return LAUNCH(stream, kernel_key(function, gx, gy, gz),
                  real(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra, before, after, flags));
END
WRAP(hipHccModuleLaunchKernel,
     (void *function, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by, uint32_t bz, size_t shared,
      void *stream, void **parameters, void **extra, void *before, void *after),
     (function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra, before, after))
    return LAUNCH(stream, kernel_key(function, gx, gy, gz),
                  real(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra, before, after));
END
#define GRAPH(symbol, form)                                                                                            \
    WRAP(symbol, (void *exec, void *stream), (exec, stream))                                                           \
        return LAUNCH(form(stream), graph_key(exec), real(exec, stream));                                    \
    END
GRAPH(hipGraphLaunch, )
GRAPH(hipGraphLaunch_spt, PER_THREAD)

/* Launches on several devices at once pass at the gate of the first. */
struct part { /* hipLaunchParams; hipFunctionLaunchParams begins alike, with its sizes as plain numbers */
    const void *function;
    uint32_t sizes[6];
    void *rest[3];
};
WRAP(hipLaunchCooperativeKernelMultiDevice, (struct part * parts, int count, unsigned flags), (parts, count, flags))
    if (parts == NULL || count < 1)
        return real(parts, count, flags);
    return LAUNCH(parts->rest[2], kernel_key(parts->function, parts->sizes[0], parts->sizes[1], parts->sizes[2]),
                  real(parts, count, flags));
END
WRAP(hipExtLaunchMultiKernelMultiDevice, (struct part * parts, int count, unsigned flags), (parts, count, flags))
    if (parts == NULL || count < 1)
        return real(parts, count, flags);
    return LAUNCH(parts->rest[2], kernel_key(parts->function, parts->sizes[0], parts->sizes[1], parts->sizes[2]),
                  real(parts, count, flags));
END
struct driver_part { /* hipFunctionLaunchParams */
    const void *function;
    uint32_t sizes[7];
    void *stream;
    void **parameters;
};
WRAP(hipModuleLaunchCooperativeKernelMultiDevice, (struct driver_part * parts, unsigned count, unsigned flags), (parts, count, flags))
    if (parts == NULL || count < 1)
        return real(parts, count, flags);
    return LAUNCH(parts->stream, kernel_key(parts->function, parts->sizes[0], parts->sizes[1], parts->sizes[2]),
                  real(parts, count, flags));
END
WRAP(hipLaunchByPtr, (const void *function), (function)) /* its stream was named before, by hipConfigureCall */
    return LAUNCH(NULL, kernel_key(function, 0, 0, 1), real(function));
END

WRAP(hipDeviceSynchronize, (void), ())
    return SYNCHRONISED(NULL, AIM_WHOLE, real());
END
WRAP(hipCtxSynchronize, (void), ())
    return SYNCHRONISED(NULL, AIM_WHOLE, real());
END
#define ON_STREAM(symbol, form)                                                                                        \
    WRAP(symbol, (void *stream), (stream))                                                                             \
        return SYNCHRONISED(form(stream), AIM_STREAM, real(stream));                                                   \
    END
ON_STREAM(hipStreamSynchronize, )
ON_STREAM(hipStreamSynchronize_spt, PER_THREAD)
ON_STREAM(hipStreamQuery, )
ON_STREAM(hipStreamQuery_spt, PER_THREAD)

/* A program that copies to the host waits for the result (PyTorch: hipMemcpyWithStream). Copies within the device are launches;
 * copies from the host are neither. */
enum { DEVICE_TO_HOST = 2, DEVICE_TO_DEVICE = 3 };
#define COPIED(kind, stream, bytes, call)                                                                              \
    ((kind) == DEVICE_TO_HOST     ? SYNCHRONISED((stream), AIM_STREAM, call)                                           \
     : (kind) == DEVICE_TO_DEVICE ? LAUNCH((stream), size_key(F_hipMemcpyDtoD, (bytes)), call)                         \
                                  : INSIDE(call))
#define COPY(symbol, form)                                                                                             \
    WRAP(symbol, (void *to, const void *from, size_t bytes, int kind), (to, from, bytes, kind))                        \
        return COPIED(kind, form(NULL), bytes, real(to, from, bytes, kind));                                           \
    END
COPY(hipMemcpy, )
COPY(hipMemcpy_spt, PER_THREAD)
WRAP(hipMemcpyWithStream, (void *to, const void *from, size_t bytes, int kind, void *stream), (to, from, bytes, kind, stream))
    return COPIED(kind, stream, bytes, real(to, from, bytes, kind, stream));
END
#define COPY_ASYNC(symbol, form)                                                                                       \
    WRAP(symbol, (void *to, const void *from, size_t bytes, int kind, void *stream), (to, from, bytes, kind, stream))  \
        if (kind != DEVICE_TO_DEVICE)                                                                                  \
            return INSIDE(real(to, from, bytes, kind, stream));                                                        \
        return LAUNCH(form(stream), size_key(F_hipMemcpyDtoD, bytes), real(to, from, bytes, kind, stream));            \
    END
COPY_ASYNC(hipMemcpyAsync, )
COPY_ASYNC(hipMemcpyAsync_spt, PER_THREAD)
WRAP(hipMemcpyDtoH, (void *to, void *from, size_t bytes), (to, from, bytes))
    return SYNCHRONISED(NULL, AIM_STREAM, real(to, from, bytes));
END
WRAP(hipMemcpyDtoD, (void *to, void *from, size_t bytes), (to, from, bytes))
    return LAUNCH(NULL, size_key(F_hipMemcpyDtoD, bytes), real(to, from, bytes));
END
WRAP(hipMemcpyDtoDAsync, (void *to, void *from, size_t bytes, void *stream), (to, from, bytes, stream))
    return LAUNCH(stream, size_key(F_hipMemcpyDtoD, bytes), real(to, from, bytes, stream));
END

#define SET(symbol, type, form)                                                                                        \
    WRAP(symbol, (void *to, type value, size_t count), (to, value, count))                                             \
        return LAUNCH(form(NULL), size_key(F_hipMemset, count * sizeof(type)), real(to, value, count));                \
    END
#define SET_ASYNC(symbol, type, form)                                                                                  \
    WRAP(symbol, (void *to, type value, size_t count, void *stream), (to, value, count, stream))                       \
        return LAUNCH(form(stream), size_key(F_hipMemset, count * sizeof(type)), real(to, value, count, stream));      \
    END
SET(hipMemset, int, )
SET(hipMemset_spt, int, PER_THREAD)
SET(hipMemsetD8, unsigned char, )
SET(hipMemsetD16, unsigned short, )
SET(hipMemsetD32, int, )
SET_ASYNC(hipMemsetAsync, int, )
SET_ASYNC(hipMemsetAsync_spt, int, PER_THREAD)
SET_ASYNC(hipMemsetD8Async, unsigned char, )
SET_ASYNC(hipMemsetD16Async, unsigned short, )
SET_ASYNC(hipMemsetD32Async, int, )

WRAP(hipStreamDestroy, (void *stream), (stream))
    STREAM_LEAVES(stream);
    return INSIDE(real(stream));
END
#define CAPTURE(symbol, form)                                                                                          \
    WRAP(symbol, (void *stream, int mode), (stream, mode))                                                             \
        return STREAM_CAPTURED(form(stream), real(stream, mode));                                                      \
    END
CAPTURE(hipStreamBeginCapture, )
CAPTURE(hipStreamBeginCapture_spt, PER_THREAD)
WRAP(hipStreamBeginCaptureToGraph, (void *stream, void *graph, const void *after, const void *edges, size_t count, int mode),
     (stream, graph, after, edges, count, mode))
    return STREAM_CAPTURED(stream, real(stream, graph, after, edges, count, mode));
END
#define CAPTURED(symbol)                                                                                               \
    WRAP(symbol, (void *stream, void **graph), (stream, graph))                                                        \
        int code = INSIDE(real(stream, graph));                                                                        \
        aim_capture_ends();                                                                                            \
        return code;                                                                                                   \
    END
CAPTURED(hipStreamEndCapture)
CAPTURED(hipStreamEndCapture_spt)

#define WAIT(symbol, form)                                                                                             \
    WRAP(symbol, (void *stream, void *event, unsigned flags), (stream, event, flags))                                  \
        aim_stream_waits_for(&DRIVER, form(stream), event);                                                            \
        return INSIDE(real(stream, event, flags));                                                                     \
    END
WAIT(hipStreamWaitEvent, )
WAIT(hipStreamWaitEvent_spt, PER_THREAD)
#define RECORD(symbol, form)                                                                                           \
    WRAP(symbol, (void *event, void *stream), (event, stream))                                                         \
        aim_event_recorded(&DRIVER, event, form(stream));                                                              \
        return INSIDE(real(event, stream));                                                                            \
    END
RECORD(hipEventRecord, )
RECORD(hipEventRecord_spt, PER_THREAD)
WRAP(hipEventRecordWithFlags, (void *event, void *stream, unsigned flags), (event, stream, flags))
    aim_event_recorded(&DRIVER, event, stream);
    return INSIDE(real(event, stream, flags));
END
EVENT_DONE(hipEventSynchronize, 1)
EVENT_DONE(hipEventQuery, 0)

enum { PER_THREAD_STREAM = 2, ANY_VERSION = 1 << 30 };
#define LOOKUP(symbol, always)                                                                                         \
    WRAP(symbol, (const char *name, void **found, int version, uint64_t flags, void *status),                          \
         (name, found, version, flags, status))                                                                        \
        int code = INSIDE(real(name, found, version, flags, status));                                                  \
        if (code == 0 && found != NULL && *found != NULL)                                                              \
            *found = aim_wrapper_for(AIM_HIP, name, *found, version, (always) || (flags & PER_THREAD_STREAM) != 0);    \
        return code == 0 && found != NULL && *found == NULL ? DRIVER.missing : code;                                   \
    END
LOOKUP(hipGetProcAddress, 0)
LOOKUP(hipGetProcAddress_spt, 1)
#define ENTRY_POINT(symbol, always)                                                                                    \
    WRAP(symbol, (const char *name, void **found, uint64_t flags, void *status), (name, found, flags, status))         \
        int code = INSIDE(real(name, found, flags, status));                                                           \
        if (code == 0 && found != NULL && *found != NULL)                                                              \
            *found = aim_wrapper_for(AIM_HIP, name, *found, ANY_VERSION, (always) || (flags & PER_THREAD_STREAM) != 0); \
        return code == 0 && found != NULL && *found == NULL ? DRIVER.missing : code;                                   \
    END
ENTRY_POINT(hipGetDriverEntryPoint, 0)
ENTRY_POINT(hipGetDriverEntryPoint_spt, 1)
