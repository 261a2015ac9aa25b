/* A driver function by name, looked up once; one that this driver does not have, too. */
#ifndef AIM_DRIVER_CALLS_H
#define AIM_DRIVER_CALLS_H

#include "aim.h"

#define AIM_NO_FUNCTION ((void *)1)

#define CALL(api, name, parameters, arguments, otherwise)                                                              \
    ({                                                                                                                 \
        static void *cached_;                                                                                          \
        void *found_ = load_acquire(&cached_);                                                                         \
        if (found_ == NULL) {                                                                                          \
            found_ = aim_driver_symbol(api, name);                                                                     \
            if (found_ == NULL && aim_driver_loaded(api))                                                              \
                found_ = AIM_NO_FUNCTION;                                                                              \
            store_release(&cached_, found_);                                                                           \
        }                                                                                                              \
        found_ == NULL || found_ == AIM_NO_FUNCTION ? (otherwise) : ((int(*) parameters)found_)arguments;              \
    })

#endif
