package main

import "github.com/spf13/cobra"

// addOperations adds the commands of those who run Waybill for others.
func addOperations(a *app, root *cobra.Command) {
	for _, c := range []*cobra.Command{newDoctor(a), newStatus(a), newBugreport(a), newHealth(a), newCA(a)} {
		c.GroupID = "setup"
		root.AddCommand(c)
	}
	root.AddCommand(newMan(a), newDoctorClient())
}
