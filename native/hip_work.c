/* HIP's runtime interface: graphs, launches, synchronisation and lookups by name. */
#define DRIVER aim_hip
#include "wrappers.h"

WRAP(hipGraphAddMemAllocNode,
     (void **node, void *graph, const void *dependencies, size_t count, struct node_parameters *parameters),
     (node, graph, dependencies, count, parameters))
    return MEMORY_NODE(graph, parameters, real(node, graph, dependencies, count, parameters));
END
WRAP(hipGraphAddNode, (void **node, void *graph, const void *dependencies, size_t count, struct any_node *parameters),
     (node, graph, dependencies, count, parameters))
    if (parameters->type != NODE_ALLOCATES)
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
WRAP(hipGraphDestroy, (void *graph), (graph))
    int code = INSIDE(real(graph));
    if (code == 0)
        aim_graph_gone(&DRIVER, P(graph));
    return code;
END
WRAP(hipGraphExecDestroy, (void *exec), (exec))
    int code = INSIDE(real(exec));
    if (code == 0)
        aim_exec_gone(&DRIVER, P(exec));
    return code;
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
        return LAUNCH(form(stream), real(function, grid, block, arguments, shared, stream));                           \
    END
KERNEL(hipLaunchKernel, )
KERNEL(hipLaunchKernel_spt, PER_THREAD)

#define COOPERATIVE(symbol, form)                                                                                      \
    WRAP(symbol,                                                                                                       \
         (const void *function, struct dim3 grid, struct dim3 block, void **arguments, unsigned shared, void *stream), \
         (function, grid, block, arguments, shared, stream))                                                           \
        return LAUNCH(form(stream), real(function, grid, block, arguments, shared, stream));                           \
    END
COOPERATIVE(hipLaunchCooperativeKernel, )
COOPERATIVE(hipLaunchCooperativeKernel_spt, PER_THREAD)

WRAP(hipExtLaunchKernel,
     (const void *function, struct dim3 grid, struct dim3 block, void **arguments, size_t shared, void *stream,
      void *before, void *after, int flags),
     (function, grid, block, arguments, shared, stream, before, after, flags))
    return LAUNCH(stream, real(function, grid, block, arguments, shared, stream, before, after, flags));
END

struct launch { /* hipLaunchConfig_t and HIP_LAUNCH_CONFIG: both have the stream at byte 32 */
    unsigned sizes[8];
    void *stream;
};
WRAP(hipLaunchKernelExC, (const struct launch *launch, const void *function, void **arguments),
     (launch, function, arguments))
    return LAUNCH(launch->stream, real(launch, function, arguments));
END
WRAP(hipDrvLaunchKernelEx, (const struct launch *launch, void *function, void **parameters, void **extra),
     (launch, function, parameters, extra))
    return LAUNCH(launch->stream, real(launch, function, parameters, extra));
END

WRAP(hipModuleLaunchKernel,
     (void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
      void *stream, void **parameters, void **extra),
     (function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra))
    return LAUNCH(stream, real(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra));
END
WRAP(hipModuleLaunchCooperativeKernel,
     (void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
      void *stream, void **parameters),
     (function, gx, gy, gz, bx, by, bz, shared, stream, parameters))
    return LAUNCH(stream, real(function, gx, gy, gz, bx, by, bz, shared, stream, parameters));
END
WRAP(hipExtModuleLaunchKernel,
     (void *function, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by, uint32_t bz, size_t shared,
      void *stream, void **parameters, void **extra, void *before, void *after, uint32_t flags),
     (function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra, before, after, flags))
    return LAUNCH(stream, real(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra, before, after, flags));
END
WRAP(hipHccModuleLaunchKernel,
     (void *function, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx, uint32_t by, uint32_t bz, size_t shared,
      void *stream, void **parameters, void **extra, void *before, void *after),
     (function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra, before, after))
    return LAUNCH(stream, real(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra, before, after));
END
#define GRAPH(symbol, form)                                                                                            \
    WRAP(symbol, (void *exec, void *stream), (exec, stream))                                                           \
        return LAUNCH(form(stream), real(exec, stream));                                                               \
    END
GRAPH(hipGraphLaunch, )
GRAPH(hipGraphLaunch_spt, PER_THREAD)

WRAP(hipDeviceSynchronize, (void), ())
    return SYNCHRONISED(real());
END
#define ON_STREAM(symbol)                                                                                              \
    WRAP(symbol, (void *stream), (stream))                                                                             \
        return SYNCHRONISED(real(stream));                                                                             \
    END
ON_STREAM(hipStreamSynchronize)
ON_STREAM(hipStreamSynchronize_spt)
ON_STREAM(hipStreamQuery)
ON_STREAM(hipStreamQuery_spt)

/* Who fetches a result waits for it; PyTorch does so by hipMemcpyWithStream. Copies the other way wait for nothing of ours. */
enum { DEVICE_TO_HOST = 2 };
#define COPY(symbol)                                                                                                   \
    WRAP(symbol, (void *to, const void *from, size_t bytes, int kind), (to, from, bytes, kind))                        \
        return kind == DEVICE_TO_HOST ? SYNCHRONISED(real(to, from, bytes, kind)) : INSIDE(real(to, from, bytes, kind)); \
    END
COPY(hipMemcpy)
COPY(hipMemcpy_spt)
WRAP(hipMemcpyWithStream, (void *to, const void *from, size_t bytes, int kind, void *stream), (to, from, bytes, kind, stream))
    if (kind != DEVICE_TO_HOST)
        return INSIDE(real(to, from, bytes, kind, stream));
    return SYNCHRONISED(real(to, from, bytes, kind, stream));
END
WRAP(hipMemcpyDtoH, (void *to, void *from, size_t bytes), (to, from, bytes))
    return SYNCHRONISED(real(to, from, bytes));
END

#define RECORD(symbol)                                                                                                 \
    WRAP(symbol, (void *event, void *stream), (event, stream))                                                         \
        aim_event_recorded(&DRIVER, event);                                                                            \
        return INSIDE(real(event, stream));                                                                            \
    END
RECORD(hipEventRecord)
RECORD(hipEventRecord_spt)
EVENT_DONE(hipEventSynchronize, 1)
EVENT_DONE(hipEventQuery, 0)

enum { PER_THREAD_STREAM = 2 };
WRAP(hipGetProcAddress, (const char *name, void **found, int version, uint64_t flags, void *status),
     (name, found, version, flags, status))
    int code = INSIDE(real(name, found, version, flags, status));
    if (code == 0 && found != NULL && *found != NULL)
        *found = aim_wrapper_for(AIM_HIP, name, *found, version, (flags & PER_THREAD_STREAM) != 0);
    return code;
END
