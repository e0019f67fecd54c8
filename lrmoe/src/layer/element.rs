//! What rows and working weights are stored as.

use lrmoe_kernels::FfnElement;
use lrmoe_kernels::half::bf16;

use sealed::Sums;

/// What a layer's rows, on the wire too, and its working weights are stored as: `f32`, or [`bf16`] with sums in f32. Gate weights and their
/// gradients, weight gradients, master weights and moments are f32 with both.
pub trait LayerElement: FfnElement + lrmoe_comm::Element + Sums {}

impl LayerElement for f32 {}
impl LayerElement for bf16 {}

mod sealed {
    use lrmoe_kernels::half::bf16;
    use lrmoe_kernels::{CompactRows, Element, Error, Memory};

    /// Rows that are rounded sums.
    pub trait Sums: Element {
        /// Where the sums grow: in `rows` if they are f32, else in `apart`.
        fn sums<'a, B: Memory>(
            rows: &'a mut B::Buffer<Self>,
            apart: &'a mut B::Buffer<f32>,
        ) -> &'a mut B::Buffer<f32>;

        /// Rounds the sums to `rows` if they grew in `apart`.
        ///
        /// # Errors
        ///
        /// Those of [`CompactRows::narrow`].
        fn round<B: CompactRows>(
            backend: &B,
            apart: &B::Buffer<f32>,
            rows: &mut B::Buffer<Self>,
        ) -> Result<(), Error>;
    }

    impl Sums for f32 {
        fn sums<'a, B: Memory>(
            rows: &'a mut B::Buffer<f32>,
            _apart: &'a mut B::Buffer<f32>,
        ) -> &'a mut B::Buffer<f32> {
            rows
        }

        fn round<B: CompactRows>(
            _backend: &B,
            _apart: &B::Buffer<f32>,
            _rows: &mut B::Buffer<f32>,
        ) -> Result<(), Error> {
            Ok(())
        }
    }

    impl Sums for bf16 {
        fn sums<'a, B: Memory>(
            _rows: &'a mut B::Buffer<bf16>,
            apart: &'a mut B::Buffer<f32>,
        ) -> &'a mut B::Buffer<f32> {
            apart
        }

        fn round<B: CompactRows>(
            backend: &B,
            apart: &B::Buffer<f32>,
            rows: &mut B::Buffer<bf16>,
        ) -> Result<(), Error> {
            backend.narrow(apart, rows)
        }
    }
}
