/* Memory that is made first and mapped later, and memory that graphs will allocate when they run. */
#include "aim.h"

#include <stdlib.h>
#include <string.h>

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
    struct aim_entry memory = {.kind = K_MEMORY, .key = ++identities, .device = device, .bytes = bytes, .memory = {.handles = 1}};
    struct aim_entry name = {.kind = K_HANDLE, .key = handle, .device = device, .of = memory.key};
    aim_allocation_put(&memory);
    aim_allocation_put(&name);
}

/* The driver frees the memory when its last handle and its last mapping are gone, in either order. */
static void keep_or_drop(struct aim_entry *memory)
{
    if (memory->memory.handles > 0 || memory->memory.mappings > 0) {
        aim_allocation_put(memory);
        return;
    }
    struct aim_entry gone;
    if (aim_allocation_take(K_MEMORY, memory->key, &gone)) {
        if (gone.memory.had_several)
            aim_allocations_repoint(K_HANDLE, gone.key, 0); /* it has had several handles */
        aim_give_back(gone.device, gone.bytes);
    }
}

void aim_handle_released(uint64_t handle)
{
    struct aim_entry name, memory;
    if (!aim_allocation_get(K_HANDLE, handle, &name) || !aim_allocation_get(K_MEMORY, name.of, &memory))
        return;
    if (--memory.memory.handles <= 0)
        aim_allocation_take(K_HANDLE, handle, &name);
    keep_or_drop(&memory);
}

/* Mappings in the order of their addresses; with the handles' mutex. */
static struct mapping {
    uint64_t address, bytes, memory;
    int device;
} *mappings;
static size_t mapped, room;

/* The first mapping that ends behind the address. */
static size_t mapping_at(uint64_t address)
{
    size_t low = 0, high = mapped;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (mappings[middle].address + mappings[middle].bytes <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

void aim_handle_mapped(uint64_t handle, uint64_t address, uint64_t bytes)
{
    struct aim_entry name, memory;
    if (!aim_allocation_get(K_HANDLE, handle, &name) || !aim_allocation_get(K_MEMORY, name.of, &memory))
        return; /* imported: charged to the process that made it */
    if (mapped == room) {
        struct mapping *larger = realloc(mappings, (room == 0 ? 256 : 2 * room) * sizeof *mappings);
        if (larger != NULL) {
            mappings = larger;
            room = room == 0 ? 256 : 2 * room;
        }
    }
    memory.memory.mappings++; /* also where there is no memory to remember the mapping: then it stays charged */
    aim_allocation_put(&memory);
    if (mapped == room)
        return;
    size_t at = mapping_at(address);
    memmove(&mappings[at + 1], &mappings[at], (mapped - at) * sizeof *mappings);
    mappings[at] = (struct mapping){.address = address, .bytes = bytes, .memory = memory.key, .device = memory.device};
    mapped++;
}

void aim_handle_unmapped(uint64_t address, uint64_t bytes)
{
    struct aim_entry memory;
    size_t first = mapping_at(address), last = first;
    for (; last < mapped && mappings[last].address - address < bytes; last++)
        if (aim_allocation_get(K_MEMORY, mappings[last].memory, &memory)) {
            memory.memory.mappings -= memory.memory.mappings > 0;
            keep_or_drop(&memory);
        }
    memmove(&mappings[first], &mappings[last], (mapped - last) * sizeof *mappings);
    mapped -= last - first;
}

void aim_handle_retained(uint64_t handle, uint64_t address)
{
    struct aim_entry memory;
    size_t at = mapping_at(address);
    if (at == mapped || mappings[at].address > address || !aim_allocation_get(K_MEMORY, mappings[at].memory, &memory))
        return;
    memory.memory.handles++;
    memory.memory.had_several = 1;
    aim_allocation_put(&memory);
    struct aim_entry name = {.kind = K_HANDLE, .key = handle, .device = memory.device, .of = memory.key};
    aim_allocation_put(&name);
}

/* The device was reset. */
void aim_mappings_forget(int device)
{
    size_t kept = 0;
    pthread_mutex_lock(&handles_mutex);
    for (size_t i = 0; i < mapped; i++)
        if (mappings[i].device != device)
            mappings[kept++] = mappings[i];
    mapped = kept;
    pthread_mutex_unlock(&handles_mutex);
}

/* Mapped into a sparse array, whose unmapping does not name it: charged until the process ends. */
void aim_handle_pinned(uint64_t handle)
{
    struct aim_entry name, memory;
    if (!aim_allocation_get(K_HANDLE, handle, &name) || !aim_allocation_get(K_MEMORY, name.of, &memory))
        return;
    memory.memory.mappings++;
    aim_allocation_put(&memory);
}

/* An importer, which may be this process, can keep it alive beyond its last handle: charged until the process ends. */
void aim_handle_exported(uint64_t handle)
{
    struct aim_entry name, memory;
    if (!aim_allocation_get(K_HANDLE, handle, &name) || !aim_allocation_get(K_MEMORY, name.of, &memory) || memory.memory.is_exported)
        return;
    memory.memory.is_exported = 1;
    memory.memory.mappings++;
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
        entry = (struct aim_entry){.kind = K_GRAPH_STREAM, .key = stream_key(graph, stream), .device = device, .of = graph};
    int64_t live = entry.graph_stream.live + (int64_t)bytes;
    uint64_t more = live > (int64_t)entry.bytes ? (uint64_t)live - entry.bytes : 0;
    pthread_mutex_unlock(&graphs_mutex);
    if (more != 0 && !aim_graph_reserve(driver, graph, device, more))
        return 0;
    pthread_mutex_lock(&graphs_mutex);
    entry.graph_stream.live = live;
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
        struct aim_entry memory = {.kind = K_GRAPH_MEMORY, .key = pointer, .device = device, .bytes = bytes, .of = graph};
        aim_allocation_put(&memory);
    } else if (aim_allocation_get(K_GRAPH_STREAM, stream_key(graph, stream), &entry)) {
        entry.graph_stream.live -= (int64_t)bytes;
        aim_allocation_put(&entry); /* the charge stays for what is captured next */
    }
    pthread_mutex_unlock(&graphs_mutex);
}

/* A free that is captured into the same graph. */
void aim_capture_freed(uint64_t graph, void *stream, uint64_t pointer)
{
    struct aim_entry memory, entry;
    pthread_mutex_lock(&graphs_mutex);
    if (aim_allocation_get(K_GRAPH_MEMORY, pointer, &memory) && memory.of == graph) {
        aim_allocation_take(K_GRAPH_MEMORY, pointer, &memory);
        if (!aim_allocation_get(K_GRAPH_STREAM, stream_key(graph, stream), &entry)) {
            entry = (struct aim_entry){.kind = K_GRAPH_STREAM, .key = stream_key(graph, stream), .of = graph};
            entry.device = memory.device;
        }
        entry.graph_stream.live -= (int64_t)memory.bytes;
        aim_allocation_put(&entry);
    }
    pthread_mutex_unlock(&graphs_mutex);
}

void aim_graph_instantiated(uint64_t graph, uint64_t exec)
{
    struct aim_entry entry;
    pthread_mutex_lock(&graphs_mutex);
    if (aim_allocation_get(K_GRAPH, graph, &entry)) {
        entry.of = exec;
        aim_allocation_put(&entry);
        struct aim_entry made = {.kind = K_EXEC, .key = exec, .device = entry.device, .of = graph};
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
        if (entry.of != 0 && aim_allocation_get(K_EXEC, entry.of, &exec)) {
            exec.bytes = entry.bytes;
            exec.of = 0;
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
        else if (exec.of != 0 && aim_allocation_get(K_GRAPH, exec.of, &graph)) {
            graph.of = 0;
            aim_allocation_put(&graph);
        }
    }
    pthread_mutex_unlock(&graphs_mutex);
}

/* Another thread may have been in the middle of a change: what the parent had is neither read nor freed. */
void aim_vmm_after_fork(void)
{
    mappings = NULL;
    mapped = room = 0;
    pthread_mutex_init(&handles_mutex, NULL);
    pthread_mutex_init(&graphs_mutex, NULL);
    for (int i = 0; i < AIM_DEVICES; i++)
        graphs[i].obliged = graphs[i].charged = 0;
}
