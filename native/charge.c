/* Before and after a call of the driver that takes or gives back memory. Every `begin` answers whether the driver is to be called, and
 * `end` gets the driver's code, and what the driver made, 0 where it failed. Between the two `aim_call_begins` keeps the driver's own
 * count from being compared with ours. */
#include "wrappers.h"

#include <string.h>

int aim_charge_begin(struct aim_charge *charge, const struct aim_driver *driver, enum aim_kind kind, int device, uint64_t bytes)
{
    *charge = (struct aim_charge){.driver = driver, .kind = kind, .device = device, .bytes = bytes};
    charge->charged = aim_charge_of(driver, kind, device, bytes);
    aim_driver_count(driver, device, charge->charged);
    aim_call_begins();
    if (aim_reserve_or_trim(driver, device, charge->charged))
        return 1;
    aim_call_ends();
    return 0;
}

int aim_charge_end(const struct aim_charge *charge, int code, uint64_t key)
{
    if (code != 0)
        aim_give_back(charge->device, charge->charged);
    else
        aim_track(charge->driver, charge->kind, key, charge->device, charge->bytes, charge->charged);
    aim_call_ends();
    return code;
}

/* Memory with a handle. The handles' lock is held during the call, since the driver may give a released handle out again. */
int aim_create_begin(struct aim_charge *charge, const struct aim_driver *driver, int device, uint64_t bytes)
{
    *charge = (struct aim_charge){.driver = driver, .kind = K_HANDLE, .device = device, .bytes = bytes, .charged = bytes};
    aim_driver_count(driver, device, bytes);
    aim_call_begins();
    if (aim_reserve_or_trim(driver, device, bytes)) {
        aim_handles_lock();
        return 1;
    }
    aim_call_ends();
    return 0;
}

int aim_create_end(const struct aim_charge *charge, int code, uint64_t handle)
{
    if (code == 0)
        aim_handle_created(handle, charge->device, charge->bytes);
    aim_handles_unlock();
    if (code != 0)
        aim_give_back(charge->device, charge->bytes);
    aim_call_ends();
    return code;
}

/* Taken out before the driver frees it: another thread may get the same address at once. */
int aim_free_begin(struct aim_free *about, const struct aim_driver *driver, enum aim_kind kind, uint64_t key, void *stream)
{
    about->driver = driver;
    about->stream = stream;
    aim_call_begins();
    about->is_known = aim_allocation_take(kind, key, &about->held);
    return 1;
}

int aim_free_end(const struct aim_free *about, int code, enum aim_free_how how)
{
    if (about->is_known && code != 0)
        aim_allocation_put(&about->held);
    else if (about->is_known && how == AIM_AT_ONCE)
        aim_untrack(&about->held);
    else if (about->is_known && how == AIM_LATER)
        aim_freed_later(about->driver, about->stream, &about->held);
    else if (about->is_known && how == AIM_TO_POOL)
        aim_pool_freed(about->driver, &about->held);
    else if (about->is_known)
        aim_stream_gone(&about->held);
    aim_call_ends();
    return code;
}

void aim_handles_begin(void)
{
    aim_call_begins();
    aim_handles_lock();
}
void aim_handles_end(void)
{
    aim_handles_unlock();
    aim_call_ends();
}

static void leave_context(const struct aim_new_stream *made)
{
    if (made->entered)
        INSIDE((made->driver->context_leave(), 0));
}

int aim_stream_make_begin(struct aim_new_stream *made, const struct aim_driver *driver, uint64_t context)
{
    made->driver = driver;
    made->context = context;
    made->entered = INSIDE(driver->context_enter(context));
    made->device = aim_current_device(driver);
    aim_driver_count(driver, made->device, driver->stream_bytes);
    aim_call_begins();
    if (aim_stream_begin(driver, made->device, context))
        return 1;
    aim_call_ends();
    leave_context(made);
    return 0;
}

int aim_stream_make_end(const struct aim_new_stream *made, int code, uint64_t stream)
{
    aim_stream_end(made->driver, made->device, made->context, stream);
    aim_call_ends();
    leave_context(made);
    return code;
}

int aim_pooled_begin(struct aim_pooled *about, const struct aim_driver *driver, void *pool, int device, void *stream, uint64_t bytes)
{
    *about = (struct aim_pooled){.driver = driver, .pool = pool, .device = device, .stream = stream};
    if (device < 0) /* host memory */
        return 1;
    about->bytes = aim_round(driver, device, bytes);
    about->is_captured = INSIDE(driver->capturing(stream, &about->graph));
    if (about->is_captured)
        return aim_capture_reserve(driver, about->graph, stream, device, about->bytes);
    aim_driver_count(driver, device, about->bytes);
    aim_call_begins();
    if (aim_pool_begin(device, driver, pool, about->bytes))
        return 1;
    aim_call_ends();
    return 0;
}

/* `pointer`: where the driver put the address. What the pool turned out to take may be too much after all: then it is freed again. */
int aim_pooled_end(const struct aim_pooled *about, int code, void *pointer)
{
    uint64_t made = 0;
    if (about->device < 0)
        return code;
    if (code == 0)
        memcpy(&made, pointer, sizeof made);
    if (about->is_captured) {
        aim_capture_ended(about->driver, about->graph, about->stream, about->device, about->bytes, made);
        return code;
    }
    if (!aim_pool_end(about->driver, about->pool, about->bytes, made) && code == 0) {
        INSIDE(about->driver->free_in_order(made, about->stream));
        memset(pointer, 0, sizeof made);
        code = about->driver->out_of_memory;
    }
    aim_call_ends();
    return code;
}

int aim_limit_end(const struct aim_entry *before, int code)
{
    if (code != 0)
        aim_limit_undo(before);
    return code;
}

int aim_node_begin(struct aim_charge *charge, const struct aim_driver *driver, uint64_t graph, const struct node_parameters *node)
{
    const struct location *where = (const struct location *)(const void *)node->pool;
    *charge = (struct aim_charge){.driver = driver, .device = where->id};
    if (where->type != ON_DEVICE)
        return 1;
    charge->charged = aim_round(driver, where->id, node->bytes);
    return aim_graph_reserve(driver, graph, where->id, charge->charged);
}

int aim_node_end(const struct aim_charge *charge, int code, uint64_t graph)
{
    if (code != 0 && charge->charged != 0)
        aim_graph_unreserve(charge->driver, graph, charge->device, charge->charged);
    return code;
}
