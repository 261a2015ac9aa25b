/* The steps of the accounting that other processes can notice. In a build with AIM_STEPS each waits for its turn and is written
 * down, so that a test can order them and replay them in the model (native/model/region.pml). Otherwise this adds nothing. */
#ifndef AIM_STEPS_H
#define AIM_STEPS_H

#include <stdint.h>

/* As numbered in the model. The value beside each is that of the effect: what was read or written, or whether it succeeded. */
enum aim_step {
    S_NO_STEP,
    S_LOCK, /* the tenant's lock; 0: not waited for any longer */
    S_UNLOCK,
    S_HELD,   /* a look at one's own place */
    S_SUMMED, /* one place of a sum */
    S_CAP,
    S_ADD,
    S_TAKE_AWAY,
    S_FAR,    /* the check after an allocation without the lock */
    S_FORMER, /* whether a place is that of this process before exec */
    S_SET_FREE,
    S_LEFT,  /* a look at the place of another */
    S_SEIZE, /* the lock for life of a place that may be left */
    S_RELEASE,
    S_LOOK, /* for a free place */
    S_LIFE, /* the lock for life of a place that looks free */
    S_CLAIM,
    S_NO_PLACE,
    S_HIGH,
    S_WIPE,
    S_SET_USED,
    S_SET_CONTEXT,
    S_ACTIVATE,
    S_DROP, /* the lock for life of a place that was given up */
    S_HOLDS, /* what a process holds, by its own count: no other notices, and a place that is taken again begins with it */
};

#ifdef AIM_STEPS
void aim_step_begins(void);
void aim_step_ends(enum aim_step step, uint64_t place, uint64_t value);
#else
static inline void aim_step_begins(void) {}
static inline void aim_step_ends(enum aim_step step, uint64_t place, uint64_t value) { (void)step, (void)place, (void)value; }
#endif

#define STEP(step, place, effect)                                                                                      \
    ({                                                                                                                 \
        aim_step_begins();                                                                                             \
        __typeof__(effect) did_ = (effect);                                                                            \
        aim_step_ends((step), (place), (uint64_t)did_);                                                                \
        did_;                                                                                                          \
    })

#endif
