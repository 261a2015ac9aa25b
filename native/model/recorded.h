/* The steps that a test recorded, for a model built with REPLAY: four bytes each, in the file that RECORDED names. */
#include <stdio.h>
#include <stdlib.h>

static unsigned char recorded[1 << 16][4];
static int recorded_steps;

__attribute__((constructor)) static void read_recorded(void)
{
    FILE *file = fopen(getenv("RECORDED"), "rb");
    recorded_steps = (int)fread(recorded, 4, 1 << 16, file);
    fclose(file);
}
