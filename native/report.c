/* Messages to the program's standard error, written whole and without the C library's streams. */
#include "aim.h"

#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

__attribute__((format(printf, 1, 0))) static void write_line(const char *format, va_list arguments)
{
    char text[512];
    int used = snprintf(text, sizeof text, "aimgpu: ");
    int more = vsnprintf(text + used, sizeof text - (size_t)used - 1, format, arguments);
    size_t length = (size_t)used + (size_t)(more < 0 ? 0 : more);
    if (length > sizeof text - 2)
        length = sizeof text - 2;
    text[length++] = '\n';
    ssize_t ignored = write(2, text, length);
    (void)ignored;
}

void aim_say(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    write_line(format, arguments);
    va_end(arguments);
}

void aim_say_once(int *said, const char *format, ...)
{
    if (__atomic_exchange_n(said, 1, __ATOMIC_RELAXED))
        return;
    va_list arguments;
    va_start(arguments, format);
    write_line(format, arguments);
    va_end(arguments);
}

/* Entry of the library as a program: the loader of a container runs it, and ends with another status where the library cannot
 * be loaded beside that container's C library. */
void aim_run(void) { _exit(0); }
