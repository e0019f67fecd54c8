/// Adds rows to the least loaded ranks. Holds scratch.
#[derive(Debug, Default)]
pub(crate) struct Pour {
    /// (load, position among the hosts, rank), ascending.
    order: Vec<(i64, usize, usize)>,
}

impl Pour {
    /// Adds `rows` to the loads of `hosts` so that the least loaded become level, the first ones a row higher
    /// where it does not divide. Calls `put` with the position of a host and its rows.
    pub(crate) fn level(
        &mut self,
        rows: u32,
        hosts: impl Iterator<Item = usize>,
        load: &mut [i64],
        mut put: impl FnMut(usize, u32),
    ) {
        self.order.clear();
        let hosts = hosts.enumerate();
        self.order
            .extend(hosts.map(|(at, rank)| (load[rank], at, rank)));
        self.order.sort_unstable();
        let Some(&(lowest, ..)) = self.order.first() else {
            return;
        };
        let mut level = lowest;
        let mut left = i64::from(rows);
        let mut width = 1;
        while let Some(&(next, ..)) = self.order.get(width) {
            let gap = (next - level) * width as i64;
            if gap > left {
                break;
            }
            left -= gap;
            level = next;
            width += 1;
        }
        let (each, more) = (left / width as i64, left % width as i64);
        for (&(before, at, rank), i) in self.order[..width].iter().zip(0..) {
            load[rank] = level + each + i64::from(i < more);
            put(at, (load[rank] - before) as u32);
        }
    }
}
