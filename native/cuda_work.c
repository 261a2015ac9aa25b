/* CUDA's driver interface: graphs, launches, copies on the device, synchronisation and lookups by name. */
#define DRIVER aim_cuda
#include "driver_calls.h"
#include "wrappers.h"

WRAP(cuGraphAddMemAllocNode,
     (void **node, void *graph, const void *dependencies, size_t count, struct node_parameters *parameters),
     (node, graph, dependencies, count, parameters))
    if (parameters == NULL)
        return INSIDE(real(node, graph, dependencies, count, parameters));
    return MEMORY_NODE(graph, parameters, real(node, graph, dependencies, count, parameters));
END
WRAP(cuGraphAddNode,
     (void **node, void *graph, const void *dependencies, size_t count, struct any_node *parameters),
     (node, graph, dependencies, count, parameters))
    if (parameters == NULL || parameters->type != NODE_ALLOCATES)
        return INSIDE(real(node, graph, dependencies, count, parameters));
    return MEMORY_NODE(graph, &parameters->memory, real(node, graph, dependencies, count, parameters));
END
WRAP(cuGraphAddNode_v2,
     (void **node, void *graph, const void *dependencies, const void *edges, size_t count, struct any_node *parameters),
     (node, graph, dependencies, edges, count, parameters))
    if (parameters == NULL || parameters->type != NODE_ALLOCATES)
        return INSIDE(real(node, graph, dependencies, edges, count, parameters));
    return MEMORY_NODE(graph, &parameters->memory, real(node, graph, dependencies, edges, count, parameters));
END
WRAP(cuGraphAddNode_v3,
     (void **node, void *graph, const void *dependencies, const void *edges, size_t count, struct any_node *parameters),
     (node, graph, dependencies, edges, count, parameters))
    if (parameters == NULL || parameters->type != NODE_ALLOCATES)
        return INSIDE(real(node, graph, dependencies, edges, count, parameters));
    return MEMORY_NODE(graph, &parameters->memory, real(node, graph, dependencies, edges, count, parameters));
END
WRAP(cuGraphInstantiate, (void **exec, void *graph, void *node, char *log, size_t size), (exec, graph, node, log, size))
    return INSTANTIATED(graph, exec, real(exec, graph, node, log, size));
END
WRAP(cuGraphInstantiate_v2, (void **exec, void *graph, void *node, char *log, size_t size), (exec, graph, node, log, size))
    return INSTANTIATED(graph, exec, real(exec, graph, node, log, size));
END
WRAP(cuGraphInstantiateWithFlags, (void **exec, void *graph, uint64_t flags), (exec, graph, flags))
    return INSTANTIATED(graph, exec, real(exec, graph, flags));
END
WRAP(cuGraphInstantiateWithParams, (void **exec, void *graph, void *parameters), (exec, graph, parameters))
    return INSTANTIATED(graph, exec, real(exec, graph, parameters));
END
WRAP(cuGraphInstantiateWithParams_ptsz, (void **exec, void *graph, void *parameters), (exec, graph, parameters))
    return INSTANTIATED(graph, exec, real(exec, graph, parameters));
END
#define UNLOAD(symbol)                                                                                                 \
    WRAP(symbol, (void *code), (code))                                                                                 \
        aim_lengths_forget(); /* before the driver can give its handles to other code */                               \
        return INSIDE(real(code));                                                                                     \
    END
UNLOAD(cuModuleUnload)
UNLOAD(cuLibraryUnload)
WRAP(cuGraphDestroy, (void *graph), (graph))
    aim_graph_gone(&DRIVER, P(graph)); /* before the driver can give the handle to another thread */
    return INSIDE(real(graph));
END
WRAP(cuGraphExecDestroy, (void *exec), (exec))
    struct aim_key key = graph_key(exec);
    aim_exec_gone(&DRIVER, P(exec));
    aim_length_forget(&key);
    return INSIDE(real(exec));
END
WRAP(cuDeviceGraphMemTrim, (int on), (on))
    int code = INSIDE(real(on));
    aim_graph_settle(&DRIVER, on);
    return code;
END

WRAP(cuLaunch, (void *function), (function))
    return LAUNCH(NULL, kernel_key(function, 1, 1, 1), real(function));
END
WRAP(cuLaunchGrid, (void *function, int width, int height), (function, width, height))
    return LAUNCH(NULL, kernel_key(function, (unsigned)width, (unsigned)height, 1), real(function, width, height));
END
WRAP(cuLaunchGridAsync, (void *function, int width, int height, void *stream), (function, width, height, stream))
    return LAUNCH(stream, kernel_key(function, (unsigned)width, (unsigned)height, 1), real(function, width, height, stream));
END

#define KERNEL(symbol, form)                                                                                           \
    WRAP(symbol,                                                                                                       \
         (void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,                \
          unsigned shared, void *stream, void **parameters, void **extra),                                             \
         (function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra))                                        \
        return LAUNCH(form(stream), kernel_key(function, gx, gy, gz),                                                  \
                      real(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra));                      \
    END
KERNEL(cuLaunchKernel, )
KERNEL(cuLaunchKernel_ptsz, PER_THREAD)

#define COOPERATIVE(symbol, form)                                                                                      \
    WRAP(symbol,                                                                                                       \
         (void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,                \
          unsigned shared, void *stream, void **parameters),                                                           \
         (function, gx, gy, gz, bx, by, bz, shared, stream, parameters))                                               \
        return LAUNCH(form(stream), kernel_key(function, gx, gy, gz),                                                  \
                      real(function, gx, gy, gz, bx, by, bz, shared, stream, parameters));                             \
    END
COOPERATIVE(cuLaunchCooperativeKernel, )
COOPERATIVE(cuLaunchCooperativeKernel_ptsz, PER_THREAD)

struct launch { /* CUlaunchConfig */
    unsigned sizes[7];
    void *stream;
};
#define KERNEL_EX(symbol, form)                                                                                        \
    WRAP(symbol, (const struct launch *launch, void *function, void **parameters, void **extra),                       \
         (launch, function, parameters, extra))                                                                        \
        if (launch == NULL)                                                                                            \
            return real(launch, function, parameters, extra);                                                          \
        return LAUNCH(form(launch->stream), kernel_key(function, launch->sizes[0], launch->sizes[1], launch->sizes[2]), \
                      real(launch, function, parameters, extra));                                                      \
    END
KERNEL_EX(cuLaunchKernelEx, )
KERNEL_EX(cuLaunchKernelEx_ptsz, PER_THREAD)

struct part { /* CUDA_LAUNCH_PARAMS */
    void *function;
    unsigned sizes[7];
    void *stream;
    void **parameters;
};
WRAP(cuLaunchCooperativeKernelMultiDevice, (struct part * parts, unsigned count, unsigned flags), (parts, count, flags))
    if (parts == NULL || count == 0)
        return real(parts, count, flags);
    return LAUNCH(parts->stream, kernel_key(parts->function, parts->sizes[0], parts->sizes[1], parts->sizes[2]),
                  real(parts, count, flags));
END

#define GRAPH(symbol, form)                                                                                            \
    WRAP(symbol, (void *exec, void *stream), (exec, stream))                                                           \
        return LAUNCH(form(stream), graph_key(exec), real(exec, stream));                                    \
    END
GRAPH(cuGraphLaunch, )
GRAPH(cuGraphLaunch_ptsz, PER_THREAD)

/* Device-to-device copies and memsets run on the processors too. */
#define COPY_ON_DEVICE(symbol)                                                                                         \
    WRAP(symbol, (uint64_t to, uint64_t from, size_t bytes), (to, from, bytes))                                        \
        return LAUNCH(NULL, size_key(F_cuMemcpyDtoD_v2, bytes), real(to, from, bytes));                                \
    END
#define COPY_ON_DEVICE_ASYNC(symbol, form)                                                                             \
    WRAP(symbol, (uint64_t to, uint64_t from, size_t bytes, void *stream), (to, from, bytes, stream))                  \
        return LAUNCH(form(stream), size_key(F_cuMemcpyDtoD_v2, bytes), real(to, from, bytes, stream));                \
    END
COPY_ON_DEVICE(cuMemcpyDtoD_v2)
COPY_ON_DEVICE(cuMemcpyDtoD_v2_ptds)
COPY_ON_DEVICE_ASYNC(cuMemcpyDtoDAsync_v2, )
COPY_ON_DEVICE_ASYNC(cuMemcpyDtoDAsync_v2_ptsz, PER_THREAD)

#define SET(symbol, type, form)                                                                                        \
    WRAP(symbol, (uint64_t to, type value, size_t count), (to, value, count))                                          \
        return LAUNCH(form(NULL), size_key(F_cuMemsetD8_v2, count * sizeof(type)), real(to, value, count));            \
    END
#define SET_ASYNC(symbol, type, form)                                                                                  \
    WRAP(symbol, (uint64_t to, type value, size_t count, void *stream), (to, value, count, stream))                    \
        return LAUNCH(form(stream), size_key(F_cuMemsetD8_v2, count * sizeof(type)), real(to, value, count, stream));  \
    END
#define SET_2D(symbol, type, form)                                                                                     \
    WRAP(symbol, (uint64_t to, size_t pitch, type value, size_t width, size_t height), (to, pitch, value, width, height)) \
        return LAUNCH(form(NULL), size_key(F_cuMemsetD2D8_v2, width * height * sizeof(type)),                          \
                      real(to, pitch, value, width, height));                                                          \
    END
#define SET_2D_ASYNC(symbol, type, form)                                                                               \
    WRAP(symbol, (uint64_t to, size_t pitch, type value, size_t width, size_t height, void *stream),                   \
         (to, pitch, value, width, height, stream))                                                                    \
        return LAUNCH(form(stream), size_key(F_cuMemsetD2D8_v2, width * height * sizeof(type)),                        \
                      real(to, pitch, value, width, height, stream));                                                  \
    END
#define SETS(bits, type)                                                                                               \
    SET(cuMemsetD##bits##_v2, type, )                                                                                  \
    SET(cuMemsetD##bits##_v2_ptds, type, PER_THREAD)                                                                   \
    SET_ASYNC(cuMemsetD##bits##Async, type, )                                                                          \
    SET_ASYNC(cuMemsetD##bits##Async_ptsz, type, PER_THREAD)                                                           \
    SET_2D(cuMemsetD2D##bits##_v2, type, )                                                                             \
    SET_2D(cuMemsetD2D##bits##_v2_ptds, type, PER_THREAD)                                                              \
    SET_2D_ASYNC(cuMemsetD2D##bits##Async, type, )                                                                     \
    SET_2D_ASYNC(cuMemsetD2D##bits##Async_ptsz, type, PER_THREAD)
SETS(8, unsigned char)
SETS(16, unsigned short)
SETS(32, unsigned)

WRAP(cuCtxSynchronize, (void), ())
    return SYNCHRONISED(NULL, AIM_WHOLE, real());
END
WRAP(cuCtxSynchronize_v2, (void *which), (which))
    int entered = INSIDE(DRIVER.context_enter(P(which)));
    int code = SYNCHRONISED(NULL, AIM_WHOLE, real(which));
    if (entered)
        INSIDE((DRIVER.context_leave(), 0));
    return code;
END
#define ON_STREAM(symbol, form)                                                                                        \
    WRAP(symbol, (void *stream), (stream))                                                                             \
        return SYNCHRONISED(form(stream), AIM_STREAM, real(stream));                                                   \
    END
ON_STREAM(cuStreamSynchronize, )
ON_STREAM(cuStreamSynchronize_ptsz, PER_THREAD)
ON_STREAM(cuStreamQuery, )
ON_STREAM(cuStreamQuery_ptsz, PER_THREAD)
#define COPY_TO_HOST(symbol, form)                                                                                     \
    WRAP(symbol, (void *to, uint64_t from, size_t bytes), (to, from, bytes))                                           \
        return SYNCHRONISED(form(NULL), AIM_STREAM, real(to, from, bytes));                                            \
    END
COPY_TO_HOST(cuMemcpyDtoH_v2, )
COPY_TO_HOST(cuMemcpyDtoH_v2_ptds, PER_THREAD)

/* A green context is a part of another one, and takes its streams' memory from there. */
static uint64_t context_of_green(void *green)
{
    void *found = NULL;
    return CALL(AIM_CUDA, "cuCtxFromGreenCtx", (void **, void *), (&found, green), 500) == 0 ? P(found) : DRIVER.context();
}
WRAP(cuStreamCreate, (void **stream, unsigned flags), (stream, flags))
    return MADE_STREAM(INSIDE(DRIVER.context()), stream, real(stream, flags));
END
WRAP(cuStreamCreateWithPriority, (void **stream, unsigned flags, int priority), (stream, flags, priority))
    return MADE_STREAM(INSIDE(DRIVER.context()), stream, real(stream, flags, priority));
END
WRAP(cuGreenCtxStreamCreate, (void **stream, void *green, unsigned flags, int priority), (stream, green, flags, priority))
    return MADE_STREAM(INSIDE(context_of_green(green)), stream, real(stream, green, flags, priority));
END
#define DESTROY(symbol)                                                                                                \
    WRAP(symbol, (void *stream), (stream))                                                                             \
        STREAM_LEAVES(stream);                                                                                         \
        return FREED_AS(K_STREAM, P(stream), NULL, AIM_STREAM_ENDS, real(stream));                                      \
    END
DESTROY(cuStreamDestroy)
DESTROY(cuStreamDestroy_v2)
WRAP(cuStreamBeginCapture, (void *stream), (stream))
    return STREAM_CAPTURED(stream, real(stream));
END
#define CAPTURE(symbol, form)                                                                                          \
    WRAP(symbol, (void *stream, int mode), (stream, mode))                                                             \
        return STREAM_CAPTURED(form(stream), real(stream, mode));                                                      \
    END
CAPTURE(cuStreamBeginCapture_ptsz, PER_THREAD)
CAPTURE(cuStreamBeginCapture_v2, )
CAPTURE(cuStreamBeginCapture_v2_ptsz, PER_THREAD)
#define CAPTURE_TO(symbol, form)                                                                                       \
    WRAP(symbol, (void *stream, void *graph, const void *after, const void *edges, size_t count, int mode),            \
         (stream, graph, after, edges, count, mode))                                                                   \
        return STREAM_CAPTURED(form(stream), real(stream, graph, after, edges, count, mode));                          \
    END
CAPTURE_TO(cuStreamBeginCaptureToGraph, )
CAPTURE_TO(cuStreamBeginCaptureToGraph_ptsz, PER_THREAD)
#define CAPTURED(symbol)                                                                                               \
    WRAP(symbol, (void *stream, void **graph), (stream, graph))                                                        \
        int code = INSIDE(real(stream, graph));                                                                        \
        aim_capture_ends();                                                                                            \
        return code;                                                                                                   \
    END
CAPTURED(cuStreamEndCapture)
CAPTURED(cuStreamEndCapture_ptsz)

#define WAIT(symbol, form)                                                                                             \
    WRAP(symbol, (void *stream, void *event, unsigned flags), (stream, event, flags))                                  \
        aim_stream_waits_for(&DRIVER, form(stream), event);                                                            \
        return INSIDE(real(stream, event, flags));                                                                     \
    END
WAIT(cuStreamWaitEvent, )
WAIT(cuStreamWaitEvent_ptsz, PER_THREAD)
#define RECORD(symbol, form)                                                                                           \
    WRAP(symbol, (void *event, void *stream), (event, stream))                                                         \
        aim_event_recorded(&DRIVER, event, form(stream));                                                              \
        return INSIDE(real(event, stream));                                                                            \
    END
#define RECORD_WITH(symbol, form)                                                                                      \
    WRAP(symbol, (void *event, void *stream, unsigned flags), (event, stream, flags))                                  \
        aim_event_recorded(&DRIVER, event, form(stream));                                                              \
        return INSIDE(real(event, stream, flags));                                                                     \
    END
RECORD(cuEventRecord, )
RECORD(cuEventRecord_ptsz, PER_THREAD)
RECORD_WITH(cuEventRecordWithFlags, )
RECORD_WITH(cuEventRecordWithFlags_ptsz, PER_THREAD)
EVENT_DONE(cuEventSynchronize, 1)
EVENT_DONE(cuEventQuery, 0)

enum { PER_THREAD_STREAM = 2 };
/* The version to judge a lookup by: a form that the driver returns for a version that we know too is a known one. */
static int known_version(const char *name, const void *found, int version, uint64_t flags)
{
    void *former = NULL;
    int status = 0;
    if (version <= AIM_NEWEST_CUDA)
        return version;
    int code = INSIDE(CALL(AIM_CUDA, "cuGetProcAddress_v2", (const char *, void **, int, uint64_t, int *),
                           (name, &former, AIM_NEWEST_CUDA, flags, &status), 500));
    return code == 0 && former == found ? AIM_NEWEST_CUDA : version;
}
static void *wrapper_for(const char *name, void *found, int version, uint64_t flags)
{
    return aim_wrapper_for(AIM_CUDA, name, found, known_version(name, found, version, flags), (flags & PER_THREAD_STREAM) != 0);
}
WRAP(cuGetProcAddress, (const char *name, void **found, int version, uint64_t flags), (name, found, version, flags))
    int code = INSIDE(real(name, found, version, flags));
    if (code == 0 && found != NULL && *found != NULL)
        *found = wrapper_for(name, *found, version, flags);
    return code == 0 && found != NULL && *found == NULL ? DRIVER.missing : code;
END
WRAP(cuGetProcAddress_v2, (const char *name, void **found, int version, uint64_t flags, void *status),
     (name, found, version, flags, status))
    int code = INSIDE(real(name, found, version, flags, status));
    if (code == 0 && found != NULL && *found != NULL)
        *found = wrapper_for(name, *found, version, flags);
    return code == 0 && found != NULL && *found == NULL ? DRIVER.missing : code;
END
