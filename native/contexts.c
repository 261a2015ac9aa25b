/* Device memory that the driver takes for contexts and streams, charged before they are made.
 *
 * The first context of a process is charged with its slot (account.c); every further one is charged as much. The driver keeps
 * the memory of a destroyed stream for the next one, so the most streams that a context had at once are charged until it ends. */
#include "aim.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct {
    uint64_t live, bytes; /* bytes: charged for those after the first */
} contexts[AIM_DEVICES];

/* What a context is charged; 0: this tenant is not charged for what the driver takes. */
static uint64_t unit_of(int device)
{
    const struct aim_share *share = aim_share_of(device);
    if (device < 0 || device >= AIM_DEVICES || share == NULL || share->broken || share->tenant == NULL)
        return 0;
    return load(&share->tenant->context_bytes);
}

/* With the mutex held: gives back what is charged beyond `want`. */
static void lower(int device, uint64_t *bytes, uint64_t want)
{
    if (*bytes > want) {
        aim_give_back(device, *bytes - want);
        *bytes = want;
    }
}

static void context_ended(int device)
{
    contexts[device].live--;
    lower(device, &contexts[device].bytes, contexts[device].live > 1 ? (contexts[device].live - 1) * unit_of(device) : 0);
}

/* 0: the context to be made would exceed the cap. Else `aim_context_end` follows. */
int aim_context_begin(const struct aim_driver *driver, int device)
{
    if (!aim_admit_context(device))
        return 0;
    if (device < 0 || device >= AIM_DEVICES)
        return 1;
    pthread_mutex_lock(&mutex);
    uint64_t unit = unit_of(device), want = contexts[device].live * unit;
    int allowed = want <= contexts[device].bytes || aim_reserve_or_trim(driver, device, want - contexts[device].bytes);
    if (allowed) {
        contexts[device].live++;
        contexts[device].bytes = want > contexts[device].bytes ? want : contexts[device].bytes;
    }
    pthread_mutex_unlock(&mutex);
    return allowed;
}

/* `context` 0: it was not made. */
void aim_context_end(int device, uint64_t context)
{
    struct aim_entry entry = {.kind = K_CONTEXT, .key = context, .device = device}, known;
    if (device < 0 || device >= AIM_DEVICES)
        return;
    pthread_mutex_lock(&mutex);
    if (context == 0 || aim_allocation_get(K_CONTEXT, context, &known))
        context_ended(device);
    else {
        aim_allocation_put(&entry);
        aim_driver_grew(device);
    }
    pthread_mutex_unlock(&mutex);
}

int aim_context_is_known(uint64_t context)
{
    struct aim_entry entry;
    return context != 0 && aim_allocation_get(K_CONTEXT, context, &entry);
}

/* After the driver destroyed it. */
void aim_context_gone(uint64_t context)
{
    struct aim_entry entry;
    pthread_mutex_lock(&mutex);
    if (aim_allocation_take(K_CONTEXT, context, &entry))
        context_ended(entry.device);
    pthread_mutex_unlock(&mutex);
}

static uint64_t charge_of(const struct aim_driver *driver, uint64_t streams)
{
    uint64_t bytes = streams * driver->stream_bytes, rest = bytes % driver->rounding;
    return rest == 0 ? bytes : bytes - rest + driver->rounding;
}

/* 0: the stream to be made would exceed the cap. Else `aim_stream_end` follows. */
int aim_stream_begin(const struct aim_driver *driver, int device, uint64_t context)
{
    struct aim_entry all;
    if (unit_of(device) == 0)
        return 1;
    pthread_mutex_lock(&mutex);
    if (!aim_allocation_get(K_STREAMS, context, &all))
        all = (struct aim_entry){.kind = K_STREAMS, .key = context, .context = context, .device = device};
    uint64_t want = charge_of(driver, all.streams.live + 1);
    int allowed = want <= all.bytes || aim_reserve_or_trim(driver, device, want - all.bytes);
    if (allowed) {
        all.streams.live++;
        all.bytes = want > all.bytes ? want : all.bytes;
        aim_allocation_put(&all);
    }
    pthread_mutex_unlock(&mutex);
    return allowed;
}

/* `stream` 0: it was not made. */
void aim_stream_end(const struct aim_driver *driver, int device, uint64_t context, uint64_t stream)
{
    struct aim_entry all, one = {.kind = K_STREAM, .key = stream, .context = context, .device = device};
    pthread_mutex_lock(&mutex);
    if (aim_allocation_get(K_STREAMS, context, &all)) {
        if (stream != 0) {
            if (all.streams.live > all.streams.most)
                aim_driver_grew(device);
            all.streams.most = all.streams.live > all.streams.most ? all.streams.live : all.streams.most;
            aim_allocation_put(&one);
        } else if (all.streams.live > 0) {
            all.streams.live--;
            lower(device, &all.bytes, charge_of(driver, all.streams.live > all.streams.most ? all.streams.live : all.streams.most));
        }
        aim_allocation_put(&all);
    }
    pthread_mutex_unlock(&mutex);
}

/* After the driver destroyed it; `held` was taken out before. */
void aim_stream_gone(const struct aim_entry *held)
{
    struct aim_entry all;
    pthread_mutex_lock(&mutex);
    if (aim_allocation_get(K_STREAMS, held->context, &all) && all.streams.live > 0) {
        all.streams.live--;
        aim_allocation_put(&all);
    }
    pthread_mutex_unlock(&mutex);
}

void aim_contexts_after_fork(void)
{
    pthread_mutex_init(&mutex, NULL);
    for (int device = 0; device < AIM_DEVICES; device++)
        contexts[device].live = contexts[device].bytes = 0;
}
