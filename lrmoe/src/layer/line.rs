//! The order in which the chunks of a pass are taken through their stages.

use super::dispatch::{Chunk, Dispatch};
use crate::error::Error;

/// What is done next.
#[derive(Debug)]
pub(super) enum Step<'a> {
    /// The chunk's rows go to their experts.
    Bring(&'a Chunk),
    /// The experts compute with the chunk's rows. Where passes overlap, rows of the next chunk come meanwhile, and those of the last go back.
    Compute {
        chunk: &'a Chunk,
        next: Option<&'a Chunk>,
        last: Option<&'a Chunk>,
    },
    /// What the experts made of the chunk's rows goes back.
    GiveBack(&'a Chunk),
}

/// Chunks on their way. With overlap up to three are: one comes, one is computed with, one goes back. Without, a chunk comes when the one
/// before it has gone. Either way the stages take the chunks in their order, so all sums are the same.
#[derive(Debug)]
pub(super) struct Line {
    /// Of the last step: what came, what was computed with, what went back.
    places: [Option<Chunk>; 3],
    overlaps: bool,
}

impl Line {
    pub(super) fn new(overlaps: bool) -> Self {
        Self {
            places: [None, None, None],
            overlaps,
        }
    }

    /// The next step; `None` once all chunks of `dispatch` have gone back.
    pub(super) fn advance(
        &mut self,
        dispatch: &mut Dispatch<'_>,
    ) -> Result<Option<Step<'_>>, Error> {
        let is_free = self.places[..2].iter().all(Option::is_none);
        self.places.rotate_right(1);
        self.places[0] = match self.overlaps || is_free {
            true => dispatch.next_chunk()?,
            false => None,
        };
        let [next, chunk, last] = self.places.each_ref().map(Option::as_ref);
        Ok(match (next, chunk, last) {
            (next, Some(chunk), last) => Some(Step::Compute { chunk, next, last }),
            (Some(chunk), None, _) => Some(Step::Bring(chunk)),
            (None, None, last) => last.map(Step::GiveBack),
        })
    }
}
