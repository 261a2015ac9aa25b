/* Declarations shared by the files of the library. Only the driver functions and the loader's functions are exported. */
#ifndef AIM_H
#define AIM_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#include "region.h"

#define AIM_DEVICES 64
#define AIM_NEWEST_CUDA 13050 /* of which every function was looked at: functions.def */
#define AIM_EXPORT __attribute__((visibility("default")))
#define AIM_UNCHECKED __attribute__((no_sanitize("address", "thread", "undefined")))

#define load(p) __atomic_load_n((p), __ATOMIC_RELAXED)
#define load_acquire(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define store(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)
#define store_release(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define add(p, v) __atomic_fetch_add((p), (v), __ATOMIC_RELAXED)

enum aim_api { AIM_CUDA, AIM_HIP, AIM_NVML, AIM_APIS };

/* Every wrapped function: an index into the table of the driver's own. */
enum aim_function {
#define HOOK(symbol, api, version) F_##symbol,
#include "functions.def"
#undef HOOK
    AIM_FUNCTIONS
};

/* resolve.c */
void *aim_real(enum aim_function function);                 /* the driver's own; NULL: this driver has none */
void *aim_driver_symbol(enum aim_api api, const char *name); /* any symbol of the driver's library */
int aim_driver_loaded(enum aim_api api);
int aim_load_library(enum aim_api api, const char *name); /* where the program has not loaded it; 0: there is none */
int aim_missing(enum aim_function function, int code); /* reports it once */
void *aim_wrapper_for(enum aim_api api, const char *base, void *real, int version, int per_thread);

/* Calls that the driver makes while it serves one of ours pass through. */
extern __thread int aim_depth;
#define INSIDE(call)                                                                                                   \
    ({                                                                                                                 \
        aim_depth++;                                                                                                   \
        __typeof__(call) result_ = (call);                                                                             \
        aim_depth--;                                                                                                   \
        result_;                                                                                                       \
    })

/* Counts of used slots, limited to what a region has. */
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
    uint64_t lock_free_until_ns; /* the lock's holder does not run: allocations are accounted without it until then */
    uint32_t index;
    int descriptor;
    int life; /* the byte that this process holds for life is locked through `descriptor` */
    int locked_pid;
    int cancel; /* cancel state of the thread that holds the mutex */
    int broken; /* the region cannot be used: refuse or pass, as `aim_fail_closed` says */
    pthread_mutex_t mutex;
};
extern int aim_fail_closed;
int aim_enabled(void);                      /* 0: no region was named, the library does nothing */
int aim_is_waiting(void);                   /* the tenant is not known yet: aimgpu_attach follows, in a child */
int aim_too_early(int code);                /* returns `code` to a call that came before it */
struct aim_share *aim_share_of(int device); /* of a driver's ordinal; NULL: no limits on this device */
struct aim_share *aim_share_at(int index);  /* in the order of AIMGPU_REGION */
int aim_share_count(void);
int aim_reopen(struct aim_share *share); /* the descriptor is ours and open, also after a fork; 0: the file is gone */
uint64_t aim_now(void);

/* devices.c: which region an ordinal of the driver belongs to */
struct aim_driver;
int aim_device_index(int device); /* -1: none */
int aim_current_device(const struct aim_driver *driver); /* without a driver call where only one device is visible */
void aim_devices_after_fork(void);

/* report.c */
void aim_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
void aim_say_once(int *said, const char *format, ...) __attribute__((format(printf, 2, 3)));
void aim_run(void);

/* life.c: which processes are alive */
void aim_life_start(void);
void aim_life_after_fork(void);
uint32_t aim_own_pid(void);
int aim_is_own_process(const struct aim_process *process);
void aim_life_describe(struct aim_process *process); /* writes this process's identity into a slot */
void aim_life_drop(struct aim_share *share);
int aim_life_take(struct aim_share *share, const struct aim_process *process); /* the lock of a place to be claimed; 0: it has another */
void aim_life_hold(struct aim_share *share, struct aim_process *process);
int aim_life_seize(const struct aim_share *share, const struct aim_process *process, int take);
int aim_life_is_held(const struct aim_share *share, const struct aim_process *process);
int aim_is_alive(const struct aim_share *share, const struct aim_process *process);

/* lock.c */
enum aim_lock { AIM_NO_FILE, AIM_ALONE, AIM_LOCKED }; /* ALONE: only among the threads of this process */
enum aim_lock aim_lock_threads(struct aim_share *share);
void aim_lock_tenant(struct aim_share *share, enum aim_lock *how); /* the processes' too, where it can be had */
void aim_unlock(struct aim_share *share, enum aim_lock how);

/* account.c */
struct aim_process *aim_attach(struct aim_share *share);
int aim_tenant_is_ours(const struct aim_share *share);
int aim_slot_is_ours(struct aim_share *share); /* forgets a slot that was reaped or given to another tenant */
void aim_forget_former_self(struct aim_share *share);
int aim_reserve(int device, uint64_t bytes);
int aim_try_reserve(int device, uint64_t bytes); /* not counted as refused: more is tried */
void aim_count_refusal(int device);
void aim_give_back(int device, uint64_t bytes);
int aim_cap(int device, uint64_t *cap, uint64_t *used); /* 0: no cap; asking charges nothing */
int aim_share_cap(const struct aim_share *share, uint64_t *cap, uint64_t *used);
int aim_admit_context(int device);                      /* 0: the context to be made would exceed the cap */

void aim_charge_beside(struct aim_share *share, uint64_t bytes, int exact); /* exact 0: only where it is more than before */

/* allocations.c: what this process holds, by key */
enum aim_kind {
    K_LINEAR,
    K_BLOCK, /* of the driver, that small allocations share */
    K_POOLED,
    K_ARRAY,
    K_MEMORY,
    K_HANDLE,
    K_POOL,
    K_GRAPH,
    K_GRAPH_STREAM, /* a stream that is captured into a graph */
    K_GRAPH_MEMORY, /* memory that a captured allocation will take */
    K_EXEC,
    K_LIMIT, /* a limit of a context, such as the heap of device code */
    K_CONTEXT,
    K_STREAM,
    K_STREAMS, /* all streams of a context */
    K_KINDS
};
struct aim_entry {
    uint64_t key; /* address or handle */
    uint64_t bytes;   /* charged for it */
    uint64_t context; /* the context it dies with; 0: none */
    uint64_t of;      /* key of the entry it belongs to: LINEAR: its block, POOLED: its pool, HANDLE: its MEMORY, GRAPH: its exec,
                         EXEC and GRAPH_*: their graph; 0: none */
    int device;       /* POOL: -1 for a pool of host memory */
    enum aim_kind kind;
    union { /* what only this kind has */
        struct {
            int allocations; /* in it */
        } block;
        struct {
            uint64_t live;    /* bytes of its allocations */
            uint64_t grains;  /* the same, each allocation in whole grains */
            uint64_t growing; /* bytes that calls under way may add */
        } pool;
        struct {
            int handles;
            int had_several; /* at some time */
            int is_exported;
            uint64_t mappings;
        } memory;
        struct {
            int64_t live; /* bytes at this point of the capture, below 0 where it frees what another stream took */
        } graph_stream;
        struct {
            uint64_t live, most; /* how many live, and the most that lived at once */
        } streams;
    };
};
int aim_allocation_put(const struct aim_entry *entry); /* replaces an entry of the same kind and key */
int aim_allocation_take(enum aim_kind kind, uint64_t key, struct aim_entry *entry);
int aim_allocation_get(enum aim_kind kind, uint64_t key, struct aim_entry *entry);
uint64_t aim_allocations_take_all(int device, unsigned kinds); /* bytes taken out */
struct aim_taken; /* entries that were taken out together */
struct aim_taken *aim_allocations_take_out(uint64_t context, unsigned kinds);
void aim_taken_put_back(struct aim_taken *taken);
void aim_taken_give_back(struct aim_taken *taken); /* their charge too */
int aim_allocation_next(enum aim_kind kind, int device, uint64_t after, struct aim_entry *entry);
void aim_allocations_repoint(enum aim_kind kind, uint64_t of, uint64_t to); /* `to` 0: taken out */
void aim_allocations_forget(void); /* after a fork: the child holds nothing */

/* cuda.c, hip.c: the driver calls that both interfaces have */
struct aim_driver {
    enum aim_api api;
    int out_of_memory, missing;
    uint64_t rounding;
    uint64_t block_bytes; /* small allocations are taken out of blocks of this size; 0: they are not */
    uint64_t pool_grain; /* a pool grows by multiples of it */
    uint64_t stream_bytes; /* device memory of a stream; 0: not known */
    int (*device)(void);
    uint64_t (*context)(void);
    int (*context_enter)(uint64_t context); /* makes it current; 0: it is, or cannot be, and nothing has to be undone */
    void (*context_leave)(void);
    int (*device_count)(void);
    int (*device_uuid)(int device, unsigned char bytes[16]); /* 0: known */
    int (*stream_device)(void *stream);
    int (*stream_is_blocking)(void *stream);
    /* Device bytes per unit of a context limit, and the units that a new context has, which its charge covers; 0: none. */
    int (*limit_unit)(int device, int limit, uint64_t *bytes, uint64_t *included);
    int (*capturing)(void *stream, uint64_t *graph);
    int (*relax)(int mode);
    int (*event_create)(void **event);
    int (*event_destroy)(void *event);
    int (*event_record)(void *event, void *stream);
    int (*event_query)(void *event);
    int (*event_elapsed)(float *milliseconds, void *from, void *to);
    int (*pool_attribute)(void *pool, int attribute, uint64_t *value);
    int (*pool_trim)(void *pool, size_t keep);
    void *(*device_pool)(int device);
    int (*graph_reserved)(int device, uint64_t *value);
    int (*graph_trim)(int device);
    int (*free_in_order)(uint64_t pointer, void *stream);
};
extern const struct aim_driver aim_cuda, aim_hip;

/* blocks.c */
uint64_t aim_round(const struct aim_driver *driver, int device, uint64_t bytes);
uint64_t aim_charge_of(const struct aim_driver *driver, enum aim_kind kind, int device, uint64_t bytes);
void aim_track(const struct aim_driver *driver, enum aim_kind kind, uint64_t key, int device, uint64_t bytes, uint64_t charged);
void aim_untrack(const struct aim_entry *held);
void aim_blocks_after_fork(void);

/* charge.c: around a call of the driver */
struct aim_charge {
    const struct aim_driver *driver;
    enum aim_kind kind;
    int device;
    uint64_t bytes, charged;
};
struct aim_free {
    const struct aim_driver *driver;
    void *stream;
    int is_known;
    struct aim_entry held;
};
enum aim_free_how { AIM_AT_ONCE, AIM_LATER, AIM_TO_POOL, AIM_STREAM_ENDS };
struct aim_new_stream {
    const struct aim_driver *driver;
    uint64_t context;
    int device, entered;
};
struct aim_pooled {
    const struct aim_driver *driver;
    void *pool, *stream;
    int device, is_captured;
    uint64_t bytes, graph;
};
struct node_parameters;
int aim_charge_begin(struct aim_charge *charge, const struct aim_driver *driver, enum aim_kind kind, int device, uint64_t bytes);
int aim_charge_end(const struct aim_charge *charge, int code, uint64_t key);
int aim_create_begin(struct aim_charge *charge, const struct aim_driver *driver, int device, uint64_t bytes);
int aim_create_end(const struct aim_charge *charge, int code, uint64_t handle);
int aim_free_begin(struct aim_free *about, const struct aim_driver *driver, enum aim_kind kind, uint64_t key, void *stream);
int aim_free_end(const struct aim_free *about, int code, enum aim_free_how how);
void aim_handles_begin(void);
void aim_handles_end(void);
int aim_stream_make_begin(struct aim_new_stream *made, const struct aim_driver *driver, uint64_t context);
int aim_stream_make_end(const struct aim_new_stream *made, int code, uint64_t stream);
int aim_pooled_begin(struct aim_pooled *about, const struct aim_driver *driver, void *pool, int device, void *stream, uint64_t bytes);
int aim_pooled_end(const struct aim_pooled *about, int code, void *pointer);
int aim_limit_end(const struct aim_entry *before, int code);
int aim_node_begin(struct aim_charge *charge, const struct aim_driver *driver, uint64_t graph, const struct node_parameters *node);
int aim_node_end(const struct aim_charge *charge, int code, uint64_t graph);

/* late.c: memory that is freed when a stream comes to it */
void aim_freed_later(const struct aim_driver *driver, void *stream, const struct aim_entry *held);
int aim_late_settle(const struct aim_driver *driver, int synchronised); /* 1: something was freed */
void aim_late_context_ended(uint64_t context);
void aim_late_after_fork(void);

/* contexts.c: what the driver takes for contexts and streams */
int aim_context_begin(const struct aim_driver *driver, int device);
void aim_context_end(int device, uint64_t context);
int aim_context_is_known(uint64_t context);
void aim_context_gone(uint64_t context);
int aim_stream_begin(const struct aim_driver *driver, int device, uint64_t context);
void aim_stream_end(const struct aim_driver *driver, int device, uint64_t context, uint64_t stream);
void aim_stream_gone(const struct aim_entry *held);
void aim_contexts_after_fork(void);

/* driver_count.c: what the driver holds beside what is counted */
void aim_call_begins(void); /* around every call that changes both; not recursive */
void aim_call_ends(void);
void aim_driver_count(const struct aim_driver *driver, int device, uint64_t bytes);
void aim_driver_grew(int device);
void aim_driver_count_after_fork(void);

/* memory.c */
int aim_reserve_or_trim(const struct aim_driver *driver, int device, uint64_t bytes);
void aim_forget_device(const struct aim_driver *driver, int device);
void aim_pools_refresh(const struct aim_driver *driver, int device);
int aim_pool_device(const struct aim_driver *driver, void *pool);
int aim_pool_begin(int device, const struct aim_driver *driver, void *pool, uint64_t bytes);
int aim_pool_end(const struct aim_driver *driver, void *pool, uint64_t bytes, uint64_t pointer); /* pointer 0: failed */
void aim_pool_freed(const struct aim_driver *driver, const struct aim_entry *entry);
uint64_t aim_pool_gone(const struct aim_driver *driver, uint64_t pool);
void aim_pool_kept(uint64_t pool, uint64_t identity);
void aim_pool_made(const struct aim_driver *driver, void *pool, int device);
int aim_limit_reserve(const struct aim_driver *driver, int device, int limit, uint64_t value, struct aim_entry *before);
void aim_limit_undo(const struct aim_entry *before);
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
void aim_handle_exported(uint64_t handle);
void aim_mappings_forget(int device);
int aim_graph_reserve(const struct aim_driver *driver, uint64_t graph, int device, uint64_t bytes);
void aim_graph_unreserve(const struct aim_driver *driver, uint64_t graph, int device, uint64_t bytes);
/* Captured allocations: what a stream frees, it may allocate again. */
int aim_capture_reserve(const struct aim_driver *driver, uint64_t graph, void *stream, int device, uint64_t bytes);
void aim_capture_ended(const struct aim_driver *driver, uint64_t graph, void *stream, int device, uint64_t bytes, uint64_t pointer);
void aim_capture_freed(uint64_t graph, void *stream, uint64_t pointer);
void aim_graph_instantiated(uint64_t graph, uint64_t exec);
void aim_graph_gone(const struct aim_driver *driver, uint64_t graph);
void aim_exec_gone(const struct aim_driver *driver, uint64_t exec);
int aim_graph_settle(const struct aim_driver *driver, int device);
void aim_vmm_after_fork(void);

/* gate.c, sync.c */
enum aim_extent { AIM_STREAM, AIM_WHOLE }; /* what a synchronisation waits for: a stream, or all of the context */
/* Identifies launches that take about equally long: a kernel with its grid, a graph, a copy of about this size. */
struct aim_key {
    uint64_t exact, function; /* function: over all its grids, or sizes; a graph has one of its own */
};
void aim_gate_enter(const struct aim_driver *driver, void *stream, struct aim_key key);
void aim_gate_leave(void);
void aim_capture_begins(void); /* around every capture of this process */
void aim_capture_ends(void);
void aim_event_recorded(const struct aim_driver *driver, const void *event, const void *stream);
void aim_event_done(const struct aim_driver *driver, const void *event, int waited, int done);
void aim_stream_waits_for(const struct aim_driver *driver, const void *stream, const void *event);
uint64_t aim_sync_enter(const struct aim_driver *driver, int waits);
void aim_sync_leave(const struct aim_driver *driver, const void *stream, enum aim_extent extent, uint64_t seen, int done);
void aim_pause_noted(const struct aim_share *share, struct aim_process *slot, uint64_t now);
void aim_inflight_stream_ends(const struct aim_driver *driver, void *stream);
void aim_inflight_context_ends(uint64_t context);
void aim_gate_after_fork(void);

/* lengths.c: lengths that were learned */
void aim_length_forget(const struct aim_key *key);
void aim_lengths_forget(void);
void aim_lengths_after_fork(void);

/* streams.c */
void aim_stream_launched(const struct aim_driver *driver, int device, const void *handle, struct aim_process *slot);
uint64_t aim_stream_clock(void);
void aim_stream_finished(const struct aim_driver *driver, int device, const void *handle, int whole, uint64_t until,
                         struct aim_process *slot);
void aim_stream_event_recorded(const struct aim_driver *driver, int device, const void *event, const void *handle);
void aim_stream_event_finished(int device, const void *event, struct aim_process *slot);
void aim_stream_waits(const struct aim_driver *driver, int device, const void *handle, const void *event);
void aim_stream_destroyed(const struct aim_driver *driver, const void *handle);
void aim_streams_after_fork(void);

#endif
