// One TDPBF16PS as src/tiles.h has it, for test_tiles.py: c[rows][columns] += a[rows][pairs] * b[pairs][columns], a row
// each 64 bytes.
#include "tiles.h"

#include <cstdint>

extern "C" void product(float* c, const uint16_t* a, const uint16_t* b, int rows, int pairs, int columns) {
  TileShapes shapes;
  shapes.set(0, rows, 4 * columns);
  shapes.set(1, rows, 4 * pairs);
  shapes.set(2, pairs, 4 * columns);
  Tiles tiles;
  tiles.configure(shapes);
  tiles.load<0>(c, 64);
  tiles.load<1>(a, 64);
  tiles.load<2>(b, 64);
  tiles.multiply<0, 1, 2>();
  tiles.store<0>(c, 64);
  tiles.release();
}
