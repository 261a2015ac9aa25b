/* Memory of an ordinary allocation that is freed in the order of a stream: the driver frees it when the stream has come to it, so
 * it stays charged until an event behind it is done. */
#include "gate.h"

#include <stdlib.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct late {
    struct late *next;
    void *event; /* NULL: none could be recorded; freed for certain when the program has waited for anything */
    uint64_t context;
    struct aim_entry held;
} *frees;

/* After the driver took the call; `held` was taken out before. */
void aim_freed_later(const struct aim_driver *driver, void *stream, const struct aim_entry *held)
{
    struct late *late = malloc(sizeof *late);
    if (late == NULL) {
        aim_untrack(held);
        return;
    }
    uint64_t context = INSIDE(driver->context());
    *late = (struct late){.held = *held, .context = context};
    if (INSIDE(RELAXED(driver, driver->event_create(&late->event))) != 0)
        late->event = NULL;
    if (late->event != NULL && INSIDE(RELAXED(driver, driver->event_record(late->event, stream))) != 0) {
        INSIDE(RELAXED(driver, driver->event_destroy(late->event))); /* a stream of another context */
        late->event = NULL;
    }
    pthread_mutex_lock(&mutex);
    late->next = frees;
    store_release(&frees, late);
    pthread_mutex_unlock(&mutex);
}

/* `synchronised`: the program has waited for something. */
int aim_late_settle(const struct aim_driver *driver, int synchronised)
{
    int any = 0;
    if (load_acquire(&frees) == NULL)
        return 0;
    pthread_mutex_lock(&mutex);
    for (struct late **at = &frees, *late; (late = *at) != NULL;) {
        if (late->event == NULL ? !synchronised : INSIDE(RELAXED(driver, driver->event_query(late->event))) == 600) { /* not ready */
            at = &late->next;
            continue;
        }
        if (late->event != NULL)
            INSIDE(RELAXED(driver, driver->event_destroy(late->event)));
        *at = late->next;
        aim_untrack(&late->held);
        free(late);
        any = 1;
    }
    pthread_mutex_unlock(&mutex);
    return any;
}

/* After the driver destroyed it, and our events with it. */
void aim_late_context_ended(uint64_t context)
{
    pthread_mutex_lock(&mutex);
    for (struct late **at = &frees, *late; (late = *at) != NULL;) {
        if (late->context != context) {
            at = &late->next;
            continue;
        }
        *at = late->next;
        aim_untrack(&late->held);
        free(late);
    }
    pthread_mutex_unlock(&mutex);
}

/* The parent's thread may have been in the middle of a change: nothing is read or freed. */
void aim_late_after_fork(void)
{
    pthread_mutex_init(&mutex, NULL);
    frees = NULL;
}
