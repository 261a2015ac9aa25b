/* Memory that is made first and mapped later, and memory that graphs will allocate when they run. */
#include "aim.h"

static pthread_mutex_t handles_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t graphs_mutex = PTHREAD_MUTEX_INITIALIZER;
static uint64_t identities;
static struct {
    uint64_t obliged; /* bytes of the allocation nodes of living graphs */
    uint64_t charged;
} graphs[AIM_DEVICES];

/* Held across the driver's call: it may give the same handle to the next caller as soon as it is released. */
void aim_handles_lock(void) { pthread_mutex_lock(&handles_mutex); }
void aim_handles_unlock(void) { pthread_mutex_unlock(&handles_mutex); }

void aim_handle_created(uint64_t handle, int device, uint64_t bytes)
{
    struct aim_entry memory = {.kind = K_MEMORY, .key = ++identities, .device = device, .bytes = bytes, .references = 1};
    struct aim_entry name = {.kind = K_HANDLE, .key = handle, .device = device, .other = memory.key};
    aim_allocation_put(&memory);
    aim_allocation_put(&name);
}

/* The driver frees the memory when its last handle and its last mapping are gone, in either order. */
static void keep_or_drop(struct aim_entry *memory)
{
    if (memory->references > 0 || memory->used > 0) {
        aim_allocation_put(memory);
        return;
    }
    struct aim_entry gone;
    if (aim_allocation_take(K_MEMORY, memory->key, &gone)) {
        aim_allocations_repoint(K_HANDLE, gone.key, 0); /* it may have had several handles */
        aim_give_back(gone.device, gone.bytes);
    }
}

void aim_handle_released(uint64_t handle)
{
    struct aim_entry name, memory;
    if (!aim_allocation_get(K_HANDLE, handle, &name) || !aim_allocation_get(K_MEMORY, name.other, &memory))
        return;
    if (--memory.references <= 0)
        aim_allocation_take(K_HANDLE, handle, &name);
    keep_or_drop(&memory);
}

void aim_handle_mapped(uint64_t handle, uint64_t address, uint64_t bytes)
{
    struct aim_entry name, memory;
    if (!aim_allocation_get(K_HANDLE, handle, &name) || !aim_allocation_get(K_MEMORY, name.other, &memory))
        return; /* imported: charged to the process that made it */
    memory.used++;
    aim_allocation_put(&memory);
    struct aim_entry mapping = {.kind = K_MAPPING, .key = address, .device = memory.device, .other = memory.key};
    mapping.used = bytes;
    aim_allocation_put(&mapping);
}

void aim_handle_unmapped(uint64_t address, uint64_t bytes)
{
    struct aim_entry mapping, memory;
    uint64_t end = address + bytes;
    if (address == 0)
        return;
    mapping.key = address - 1;
    while (aim_allocation_get(K_MAPPING, address, &mapping) || aim_allocation_next(K_MAPPING, -1, address - 1, &mapping)) {
        if (mapping.key >= end)
            return;
        aim_allocation_take(K_MAPPING, mapping.key, &mapping);
        if (aim_allocation_get(K_MEMORY, mapping.other, &memory)) {
            memory.used -= memory.used > 0;
            keep_or_drop(&memory);
        }
        address = mapping.key + (mapping.used > 0 ? mapping.used : 1);
        if (address >= end)
            return;
    }
}

void aim_handle_retained(uint64_t handle, uint64_t address)
{
    struct aim_entry mapping = {.key = 0}, memory;
    int found = aim_allocation_get(K_MAPPING, address, &mapping);
    uint64_t after = 0;
    while (!found && aim_allocation_next(K_MAPPING, -1, after, &mapping) && mapping.key <= address) {
        found = address - mapping.key < mapping.used;
        after = mapping.key;
    }
    if (!found || !aim_allocation_get(K_MEMORY, mapping.other, &memory))
        return;
    memory.references++;
    aim_allocation_put(&memory);
    struct aim_entry name = {.kind = K_HANDLE, .key = handle, .device = memory.device, .other = memory.key};
    aim_allocation_put(&name);
}

/* Mapped into a sparse array, whose unmapping does not name it: charged until the process ends. */
void aim_handle_pinned(uint64_t handle)
{
    struct aim_entry name, memory;
    if (!aim_allocation_get(K_HANDLE, handle, &name) || !aim_allocation_get(K_MEMORY, name.other, &memory))
        return;
    memory.used++;
    aim_allocation_put(&memory);
}

static int settle(const struct aim_driver *driver, int device)
{
    uint64_t reserved = 0;
    if (INSIDE(driver->graph_reserved(device, &reserved)) != 0)
        reserved = 0;
    uint64_t want = reserved > graphs[device].obliged ? reserved : graphs[device].obliged;
    if (want > graphs[device].charged && !aim_reserve(device, want - graphs[device].charged))
        return 0;
    if (want < graphs[device].charged)
        aim_give_back(device, graphs[device].charged - want);
    graphs[device].charged = want;
    return 1;
}

int aim_graph_settle(const struct aim_driver *driver, int device)
{
    if (device < 0 || device >= AIM_DEVICES)
        return 1;
    pthread_mutex_lock(&graphs_mutex);
    int fits = settle(driver, device);
    pthread_mutex_unlock(&graphs_mutex);
    return fits;
}

static void disoblige(const struct aim_driver *driver, int device, uint64_t bytes)
{
    graphs[device].obliged -= bytes < graphs[device].obliged ? bytes : graphs[device].obliged;
    settle(driver, device);
}

/* A graph's memory is charged when the node is made: a launch could not be refused any more. */
int aim_graph_reserve(const struct aim_driver *driver, uint64_t graph, int device, uint64_t bytes)
{
    if (device < 0 || device >= AIM_DEVICES)
        return aim_reserve(device, bytes);
    pthread_mutex_lock(&graphs_mutex);
    graphs[device].obliged += bytes;
    int fits = settle(driver, device);
    if (!fits)
        graphs[device].obliged -= bytes;
    pthread_mutex_unlock(&graphs_mutex);
    if (!fits)
        return 0;
    pthread_mutex_lock(&graphs_mutex);
    struct aim_entry entry;
    if (!aim_allocation_get(K_GRAPH, graph, &entry))
        entry = (struct aim_entry){.kind = K_GRAPH, .key = graph, .device = device};
    entry.bytes += bytes;
    aim_allocation_put(&entry);
    pthread_mutex_unlock(&graphs_mutex);
    return 1;
}

void aim_graph_unreserve(const struct aim_driver *driver, uint64_t graph, int device, uint64_t bytes)
{
    struct aim_entry entry;
    pthread_mutex_lock(&graphs_mutex);
    if (aim_allocation_get(K_GRAPH, graph, &entry)) {
        entry.bytes -= bytes < entry.bytes ? bytes : entry.bytes;
        aim_allocation_put(&entry);
        disoblige(driver, device, bytes);
    }
    pthread_mutex_unlock(&graphs_mutex);
}

static uint64_t stream_key(uint64_t graph, const void *stream)
{
    return (graph * 0x9e3779b97f4a7c15u ^ (uint64_t)(uintptr_t)stream) | 1;
}

/* An allocation that is captured. What the same stream freed before it can be used again, so each stream is charged for the
 * most that it has live at once. */
int aim_capture_reserve(const struct aim_driver *driver, uint64_t graph, void *stream, int device, uint64_t bytes)
{
    struct aim_entry entry;
    pthread_mutex_lock(&graphs_mutex);
    if (!aim_allocation_get(K_GRAPH_STREAM, stream_key(graph, stream), &entry))
        entry = (struct aim_entry){.kind = K_GRAPH_STREAM, .key = stream_key(graph, stream), .device = device, .other = graph};
    int64_t live = (int64_t)entry.used + (int64_t)bytes;
    uint64_t more = live > (int64_t)entry.bytes ? (uint64_t)live - entry.bytes : 0;
    pthread_mutex_unlock(&graphs_mutex);
    if (more != 0 && !aim_graph_reserve(driver, graph, device, more))
        return 0;
    pthread_mutex_lock(&graphs_mutex);
    entry.used = (uint64_t)live;
    entry.bytes += more;
    aim_allocation_put(&entry);
    pthread_mutex_unlock(&graphs_mutex);
    return 1;
}

/* After the driver's call; `pointer` 0: it failed. */
void aim_capture_ended(const struct aim_driver *driver, uint64_t graph, void *stream, int device, uint64_t bytes, uint64_t pointer)
{
    struct aim_entry entry;
    (void)driver;
    pthread_mutex_lock(&graphs_mutex);
    if (pointer != 0) {
        struct aim_entry memory = {.kind = K_GRAPH_MEMORY, .key = pointer, .device = device, .bytes = bytes, .other = graph};
        aim_allocation_put(&memory);
    } else if (aim_allocation_get(K_GRAPH_STREAM, stream_key(graph, stream), &entry)) {
        entry.used -= bytes;
        aim_allocation_put(&entry); /* the charge stays for what is captured next */
    }
    pthread_mutex_unlock(&graphs_mutex);
}

/* A free that is captured into the same graph. */
void aim_capture_freed(uint64_t graph, void *stream, uint64_t pointer)
{
    struct aim_entry memory, entry;
    pthread_mutex_lock(&graphs_mutex);
    if (aim_allocation_get(K_GRAPH_MEMORY, pointer, &memory) && memory.other == graph) {
        aim_allocation_take(K_GRAPH_MEMORY, pointer, &memory);
        if (!aim_allocation_get(K_GRAPH_STREAM, stream_key(graph, stream), &entry)) {
            entry = (struct aim_entry){.kind = K_GRAPH_STREAM, .key = stream_key(graph, stream), .other = graph};
            entry.device = memory.device;
        }
        entry.used -= memory.bytes;
        aim_allocation_put(&entry);
    }
    pthread_mutex_unlock(&graphs_mutex);
}

void aim_graph_instantiated(uint64_t graph, uint64_t exec)
{
    struct aim_entry entry;
    pthread_mutex_lock(&graphs_mutex);
    if (aim_allocation_get(K_GRAPH, graph, &entry)) {
        entry.other = exec;
        aim_allocation_put(&entry);
        struct aim_entry made = {.kind = K_EXEC, .key = exec, .device = entry.device, .other = graph};
        aim_allocation_put(&made);
    }
    pthread_mutex_unlock(&graphs_mutex);
}

/* What is instantiated can still run after its graph is destroyed: it takes the obligation over. */
void aim_graph_gone(const struct aim_driver *driver, uint64_t graph)
{
    struct aim_entry entry, exec;
    pthread_mutex_lock(&graphs_mutex);
    aim_allocations_repoint(K_GRAPH_STREAM, graph, 0);
    aim_allocations_repoint(K_GRAPH_MEMORY, graph, 0);
    if (aim_allocation_take(K_GRAPH, graph, &entry)) {
        if (entry.other != 0 && aim_allocation_get(K_EXEC, entry.other, &exec)) {
            exec.bytes = entry.bytes;
            exec.other = 0;
            aim_allocation_put(&exec);
        } else {
            disoblige(driver, entry.device, entry.bytes);
        }
    }
    pthread_mutex_unlock(&graphs_mutex);
}

void aim_exec_gone(const struct aim_driver *driver, uint64_t key)
{
    struct aim_entry exec, graph;
    pthread_mutex_lock(&graphs_mutex);
    if (aim_allocation_take(K_EXEC, key, &exec)) {
        if (exec.bytes != 0)
            disoblige(driver, exec.device, exec.bytes);
        else if (exec.other != 0 && aim_allocation_get(K_GRAPH, exec.other, &graph)) {
            graph.other = 0;
            aim_allocation_put(&graph);
        }
    }
    pthread_mutex_unlock(&graphs_mutex);
}

void aim_vmm_after_fork(void)
{
    pthread_mutex_init(&handles_mutex, NULL);
    pthread_mutex_init(&graphs_mutex, NULL);
    for (int i = 0; i < AIM_DEVICES; i++)
        graphs[i].obliged = graphs[i].charged = 0;
}
