//! Open Space, a command of our own: requests without queues of the program's own (docs/hardware.md, "FastPath").

use millrace_engine_model::map::fastpath;
use millrace_memory::Access;
use millrace_nvme_spec::{
    command::{NamespaceId, Sqe},
    status::Status,
};

use super::{
    super::{
        card::{SPACE_QUEUE, SPACE_RING, SpaceError},
        controller::Controller,
        errors::parameter,
    },
    Progress, done, is_reachable,
};

impl Controller {
    /// Opens a space in the place of I/O queue pair 1, which exists from then on and is deleted like any other. There are no I/O queues yet.
    pub(super) fn open_space(&mut self, sqe: &Sqe) -> Progress {
        let Some(most) = self.port.as_ref().filter(|port| port.spaces() > 0).map(|port| port.space_pages()) else {
            return Err(Status::INVALID_OPCODE);
        };
        if (1..=self.config.queues).any(|qid| self.sq_exists(qid) || self.cq_exists(qid)) {
            return Err(Status::COMMAND_SEQUENCE_ERROR);
        }
        let (ring, pages) = (sqe.dptr.prp1, sqe.cdw10);
        if pages == 0 || pages > most {
            return Err(self.invalid(10, 0));
        }
        if !ring.is_multiple_of(SPACE_RING) {
            return Err(Status::PRP_OFFSET_INVALID);
        }
        if !is_reachable(&self.memory, ring, SPACE_RING, Access::Write) {
            return Err(self.refuse(parameter::DPTR, Status::INVALID_FIELD));
        }
        let block = self.active(NamespaceId(1))?.namespace.volume.geometry().block_size;
        let port = self.port.as_mut().expect("it was there above");
        port.open_space(ring, pages, block.shift() as u8).map_err(|error| match error {
            SpaceError::AllTaken => Status::NOT_ENOUGH_RESOURCES,
            SpaceError::PageInUse => Status::INVALID_FIELD,
        })?;
        self.create_cq(SPACE_QUEUE, ring, fastpath::ENTRIES.into(), None);
        self.create_sq(SPACE_QUEUE, ring, fastpath::ENTRIES.into(), SPACE_QUEUE, 0);
        Ok(done(fastpath::TAGS.into()))
    }
}
