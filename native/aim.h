/* What the parts of the library share. Nothing here is exported but the driver functions themselves. */
#ifndef AIM_H
#define AIM_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "region.h"

#define AIM_DEVICES 16
#define AIM_EXPORT __attribute__((visibility("default")))
#define AIM_UNCHECKED __attribute__((no_sanitize("address", "thread", "undefined")))

#define load(p) __atomic_load_n((p), __ATOMIC_RELAXED)
#define load_acquire(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define store(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)
#define store_release(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define add(p, v) __atomic_fetch_add((p), (v), __ATOMIC_RELAXED)

enum aim_api { AIM_CUDA, AIM_HIP, AIM_NVML, AIM_APIS };

/* Every function that is wrapped: an index into the table of real ones. */
enum aim_function {
#define HOOK(symbol, api, version) F_##symbol,
#include "functions.def"
#undef HOOK
    AIM_FUNCTIONS
};

/* resolve.c */
void *aim_real(enum aim_function function);                 /* the driver's own; NULL: this driver has none */
void *aim_driver_symbol(enum aim_api api, const char *name); /* any symbol of the driver's library */
void *aim_wrapper_for(enum aim_api api, const char *base, void *real, int version, int per_thread);

/* A call that the driver makes while it serves one of ours is its own business. */
extern __thread int aim_depth;
#define INSIDE(call)                                                                                                   \
    ({                                                                                                                 \
        aim_depth++;                                                                                                   \
        __typeof__(call) result_ = (call);                                                                             \
        aim_depth--;                                                                                                   \
        result_;                                                                                                       \
    })

/* Counts of used slots, whatever a broken region says. */
static inline uint32_t aim_tenants(const struct aim_region *region)
{
    uint32_t count = load(&region->header.tenant_high);
    return count > AIM_TENANTS ? AIM_TENANTS : count;
}
static inline uint32_t aim_processes(const struct aim_tenant *tenant)
{
    uint32_t count = load(&tenant->process_high);
    return count > AIM_PROCESSES ? AIM_PROCESSES : count;
}

/* region.c */
struct aim_share {
    struct aim_region *region;
    struct aim_tenant *tenant; /* NULL: not enforced, or everything refused */
    struct aim_process *slot;  /* this process; NULL until it first uses the device */
    const char *path;
    const char *wrong; /* why it is broken */
    uint64_t epoch;
    uint64_t device_number, inode;
    uint64_t held; /* bytes of this process, whatever becomes of its slot */
    uint32_t index;
    int descriptor;
    int locked_pid;
    int cancel; /* of the thread that holds the lock */
    int broken; /* the region cannot be used: refuse or let pass, as `aim_fail_closed` says */
    pthread_mutex_t mutex;
};
extern int aim_fail_closed;
int aim_enabled(void);                   /* 0: no region was named, the library does nothing */
struct aim_share *aim_share_of(int device); /* NULL: no limits on this device */
struct aim_process *aim_attach(struct aim_share *share);
int aim_only_device(void); /* 0 where one device is granted, so that nobody need ask which; else -1 */
int aim_reserve(int device, uint64_t bytes);
void aim_give_back(int device, uint64_t bytes);
int aim_cap(int device, uint64_t *cap, uint64_t *used); /* 0: no cap; looking charges nothing */
int aim_admit_context(int device); /* 0: the context that is to be made would pass the cap */
uint64_t aim_now(void);
void aim_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
void aim_say_once(int *said, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* allocations.c: what this process holds, by key */
enum aim_kind { K_LINEAR, K_POOLED, K_ARRAY, K_MEMORY, K_HANDLE, K_MAPPING, K_POOL, K_GRAPH, K_EXEC, K_KINDS };
struct aim_entry {
    uint64_t key;
    uint64_t bytes;
    uint64_t context; /* the context it dies with; 0: none */
    uint64_t other;   /* POOLED: its pool; HANDLE, MAPPING: identity of the MEMORY; GRAPH: its exec; EXEC: its graph */
    uint64_t used;    /* POOL: live bytes; MEMORY: mappings */
    int device;
    int references; /* MEMORY: handles to it; POOL: allocations under way */
    enum aim_kind kind;
};
int aim_allocation_put(const struct aim_entry *entry); /* replaces an entry of the same kind and key */
int aim_allocation_take(enum aim_kind kind, uint64_t key, struct aim_entry *entry);
int aim_allocation_get(enum aim_kind kind, uint64_t key, struct aim_entry *entry);
uint64_t aim_allocations_take_all(int device, uint64_t context, unsigned kinds); /* bytes taken out */
int aim_allocation_next(enum aim_kind kind, int device, uint64_t after, struct aim_entry *entry);
void aim_allocations_forget(void); /* after a fork: the child holds nothing */

/* driver.c: the few driver calls that both interfaces have */
struct aim_driver {
    enum aim_api api;
    int out_of_memory, missing;
    uint64_t rounding;
    uint64_t pool_grain; /* a pool grows by multiples of it */
    int (*device)(void);
    uint64_t (*context)(void);
    int (*capturing)(void *stream, uint64_t *graph);
    int (*relax)(int mode);
    int (*event_create)(void **event);
    int (*event_record)(void *event, void *stream);
    int (*event_query)(void *event);
    int (*event_elapsed)(float *milliseconds, void *from, void *to);
    int (*pool_attribute)(void *pool, int attribute, uint64_t *value);
    int (*pool_trim)(void *pool, size_t keep);
    void *(*device_pool)(int device);
    int (*graph_reserved)(int device, uint64_t *value);
    int (*graph_trim)(int device);
};
extern const struct aim_driver aim_cuda, aim_hip;

/* memory.c */
uint64_t aim_round(const struct aim_driver *driver, int device, uint64_t bytes);
int aim_reserve_hard(const struct aim_driver *driver, int device, uint64_t bytes); /* trims pools before it gives up */
void aim_track(const struct aim_driver *driver, enum aim_kind kind, uint64_t key, int device, uint64_t bytes);
void aim_forget_context(int device, uint64_t context, unsigned kinds);
void aim_forget_device(const struct aim_driver *driver, int device);
void aim_pools_refresh(const struct aim_driver *driver, int device); /* device -1: all that changed */
int aim_pool_device(const struct aim_driver *driver, void *pool);
int aim_pool_begin(int device, const struct aim_driver *driver, void *pool, uint64_t bytes);
int aim_pool_end(const struct aim_driver *driver, void *pool, uint64_t bytes, uint64_t pointer); /* pointer 0: failed */
void aim_pool_freed(const struct aim_entry *entry);
void aim_pool_gone(uint64_t pool);
void aim_memory_after_fork(void);

/* vmm.c: memory with handles and mappings, and the memory of graphs */
void aim_handles_lock(void);
void aim_handles_unlock(void);
void aim_handle_created(uint64_t handle, int device, uint64_t bytes);
void aim_handle_released(uint64_t handle);
void aim_handle_mapped(uint64_t handle, uint64_t address, uint64_t bytes);
void aim_handle_unmapped(uint64_t address, uint64_t bytes);
void aim_handle_retained(uint64_t handle, uint64_t address);
void aim_handle_pinned(uint64_t handle);
int aim_graph_reserve(const struct aim_driver *driver, uint64_t graph, int device, uint64_t bytes);
void aim_graph_unreserve(const struct aim_driver *driver, uint64_t graph, int device, uint64_t bytes);
void aim_graph_instantiated(uint64_t graph, uint64_t exec);
void aim_graph_gone(const struct aim_driver *driver, uint64_t graph);
void aim_exec_gone(const struct aim_driver *driver, uint64_t exec);
int aim_graph_settle(const struct aim_driver *driver, int device);
void aim_vmm_after_fork(void);

/* gate.c */
void aim_gate_enter(const struct aim_driver *driver, void *stream);
void aim_gate_leave(const struct aim_driver *driver, void *stream);
void aim_launch_noted(const struct aim_share *share, struct aim_process *slot, uint64_t now);
void aim_event_recorded(const struct aim_driver *driver, void *event);
void aim_event_wait(const struct aim_driver *driver, int waits);
void aim_event_done(const struct aim_driver *driver, void *event, int waited, int finished);
uint64_t aim_sync_enter(const struct aim_driver *driver);
void aim_sync_leave(const struct aim_driver *driver, uint64_t seen, int finished);
void aim_gate_after_fork(void);

#endif
