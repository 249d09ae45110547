// One TDPBF16PS as src/tiles.h has it, for test_tiles.py: c[rows][columns] += a[rows][pairs] * b[pairs][columns], a row
// each 64 bytes.
#include "tiles.h"

#include <cstdint>

extern "C" void product(float* c, const uint16_t* a, const uint16_t* b, int rows, int pairs, int columns) {
  TileShapes shapes;
  shapes.rows[0] = shapes.rows[1] = uint8_t(rows);
  shapes.rows[2] = uint8_t(pairs);
  shapes.row_bytes[0] = shapes.row_bytes[2] = uint16_t(4 * columns);
  shapes.row_bytes[1] = uint16_t(4 * pairs);
  Tiles tiles;
  tiles.configure(shapes);
  tiles.load<0>(c, 64);
  tiles.load<1>(a, 64);
  tiles.load<2>(b, 64);
  tiles.multiply<0, 1, 2>();
  tiles.store<0>(c, 64);
  tiles.release();
}
