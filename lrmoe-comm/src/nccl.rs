#[cfg(feature = "nccl")]
mod device;
mod form;
mod meeting;
mod plan;
mod staged;
#[cfg(test)]
mod tests;

#[cfg(feature = "nccl")]
pub use world::Nccl;

#[cfg(feature = "nccl")]
mod world;
