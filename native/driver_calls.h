/* A driver function by name, looked up once. */
#ifndef AIM_DRIVER_CALLS_H
#define AIM_DRIVER_CALLS_H

#include "aim.h"

#define CALL(api, name, parameters, arguments, otherwise)                                                              \
    ({                                                                                                                 \
        static void *cached_;                                                                                          \
        void *found_ = load_acquire(&cached_);                                                                         \
        if (found_ == NULL) {                                                                                          \
            found_ = aim_driver_symbol(api, name);                                                                     \
            store_release(&cached_, found_);                                                                           \
        }                                                                                                              \
        found_ == NULL ? (otherwise) : ((int(*) parameters)found_)arguments;                                           \
    })

#endif
