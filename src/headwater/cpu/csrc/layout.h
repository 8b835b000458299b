/* The table of structs and constants that a library exports, so that Python can compare it with its own (cpu/layout.py). */

#include <stddef.h>
#include <stdint.h>

/* A constant has its value and no size; a struct its size; a field its offset and its size. An entry without a name ends the table. */
typedef struct { const char *name; int64_t value, size; } LayoutEntry;

#define CONSTANT(name) {#name, name, 0}
#define STRUCT(type) {#type, 0, sizeof(type)}
#define FIELD(type, field) {#type "." #field, offsetof(type, field), sizeof(((type *)0)->field)}
#define END_OF_LAYOUT {NULL, 0, 0}
