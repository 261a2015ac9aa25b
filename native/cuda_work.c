/* CUDA's driver interface: graphs, launches, synchronisation and lookups by name. */
#define DRIVER aim_cuda
#include "wrappers.h"

WRAP(cuGraphAddMemAllocNode,
     (void **node, void *graph, const void *dependencies, size_t count, struct node_parameters *parameters),
     (node, graph, dependencies, count, parameters))
    return MEMORY_NODE(graph, parameters, real(node, graph, dependencies, count, parameters));
END
WRAP(cuGraphAddNode,
     (void **node, void *graph, const void *dependencies, size_t count, struct any_node *parameters),
     (node, graph, dependencies, count, parameters))
    if (parameters->type != NODE_ALLOCATES)
        return INSIDE(real(node, graph, dependencies, count, parameters));
    return MEMORY_NODE(graph, &parameters->memory, real(node, graph, dependencies, count, parameters));
END
WRAP(cuGraphAddNode_v2,
     (void **node, void *graph, const void *dependencies, const void *edges, size_t count, struct any_node *parameters),
     (node, graph, dependencies, edges, count, parameters))
    if (parameters->type != NODE_ALLOCATES)
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
WRAP(cuGraphDestroy, (void *graph), (graph))
    int code = INSIDE(real(graph));
    if (code == 0)
        aim_graph_gone(&DRIVER, P(graph));
    return code;
END
WRAP(cuGraphExecDestroy, (void *exec), (exec))
    int code = INSIDE(real(exec));
    if (code == 0)
        aim_exec_gone(&DRIVER, P(exec));
    return code;
END
WRAP(cuDeviceGraphMemTrim, (int on), (on))
    int code = INSIDE(real(on));
    aim_graph_settle(&DRIVER, on);
    return code;
END

WRAP(cuLaunch, (void *function), (function))
    return LAUNCH(NULL, real(function));
END
WRAP(cuLaunchGrid, (void *function, int width, int height), (function, width, height))
    return LAUNCH(NULL, real(function, width, height));
END
WRAP(cuLaunchGridAsync, (void *function, int width, int height, void *stream), (function, width, height, stream))
    return LAUNCH(stream, real(function, width, height, stream));
END

#define KERNEL(symbol, form)                                                                                           \
    WRAP(symbol,                                                                                                       \
         (void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,                \
          unsigned shared, void *stream, void **parameters, void **extra),                                             \
         (function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra))                                        \
        return LAUNCH(form(stream), real(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra));        \
    END
KERNEL(cuLaunchKernel, )
KERNEL(cuLaunchKernel_ptsz, PER_THREAD)

#define COOPERATIVE(symbol, form)                                                                                      \
    WRAP(symbol,                                                                                                       \
         (void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,                \
          unsigned shared, void *stream, void **parameters),                                                           \
         (function, gx, gy, gz, bx, by, bz, shared, stream, parameters))                                               \
        return LAUNCH(form(stream), real(function, gx, gy, gz, bx, by, bz, shared, stream, parameters));               \
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
        return LAUNCH(form(launch->stream), real(launch, function, parameters, extra));                                \
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
    return LAUNCH(parts->stream, real(parts, count, flags));
END

#define GRAPH(symbol, form)                                                                                            \
    WRAP(symbol, (void *exec, void *stream), (exec, stream))                                                           \
        return LAUNCH(form(stream), real(exec, stream));                                                               \
    END
GRAPH(cuGraphLaunch, )
GRAPH(cuGraphLaunch_ptsz, PER_THREAD)

WRAP(cuCtxSynchronize, (void), ())
    return SYNCHRONISED(real());
END
WRAP(cuCtxSynchronize_v2, (void *which), (which))
    return SYNCHRONISED(real(which));
END
#define ON_STREAM(symbol)                                                                                              \
    WRAP(symbol, (void *stream), (stream))                                                                             \
        return SYNCHRONISED(real(stream));                                                                             \
    END
ON_STREAM(cuStreamSynchronize)
ON_STREAM(cuStreamSynchronize_ptsz)
ON_STREAM(cuStreamQuery)
ON_STREAM(cuStreamQuery_ptsz)
#define COPY(symbol)                                                                                                   \
    WRAP(symbol, (void *to, uint64_t from, size_t bytes), (to, from, bytes))                                           \
        return SYNCHRONISED(real(to, from, bytes));                                                                    \
    END
COPY(cuMemcpyDtoH_v2)
COPY(cuMemcpyDtoH_v2_ptds)

#define RECORD(symbol)                                                                                                 \
    WRAP(symbol, (void *event, void *stream), (event, stream))                                                         \
        aim_event_recorded(&DRIVER, event);                                                                            \
        return INSIDE(real(event, stream));                                                                            \
    END
#define RECORD_WITH(symbol)                                                                                            \
    WRAP(symbol, (void *event, void *stream, unsigned flags), (event, stream, flags))                                  \
        aim_event_recorded(&DRIVER, event);                                                                            \
        return INSIDE(real(event, stream, flags));                                                                     \
    END
RECORD(cuEventRecord)
RECORD(cuEventRecord_ptsz)
RECORD_WITH(cuEventRecordWithFlags)
RECORD_WITH(cuEventRecordWithFlags_ptsz)
EVENT_DONE(cuEventSynchronize, 1)
EVENT_DONE(cuEventQuery, 0)

enum { PER_THREAD_STREAM = 2 };
WRAP(cuGetProcAddress, (const char *name, void **found, int version, uint64_t flags), (name, found, version, flags))
    int code = INSIDE(real(name, found, version, flags));
    if (code == 0 && *found != NULL)
        *found = aim_wrapper_for(AIM_CUDA, name, *found, version, (flags & PER_THREAD_STREAM) != 0);
    return code;
END
WRAP(cuGetProcAddress_v2, (const char *name, void **found, int version, uint64_t flags, void *status),
     (name, found, version, flags, status))
    int code = INSIDE(real(name, found, version, flags, status));
    if (code == 0 && found != NULL && *found != NULL)
        *found = aim_wrapper_for(AIM_CUDA, name, *found, version, (flags & PER_THREAD_STREAM) != 0);
    return code;
END
